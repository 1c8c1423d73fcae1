"""This process and its host: runtime, Java, files and limits."""
