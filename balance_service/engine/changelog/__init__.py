"""The changelog: written by the owner, read by standbys and by whoever opens a store."""
