"""What a batch job leaves for the owners of a generation: a folder with sorted files and a manifest."""
