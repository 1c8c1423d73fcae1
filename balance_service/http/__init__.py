"""What is asked: queries, commands and operations over HTTP."""
