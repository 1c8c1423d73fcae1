"""Generates the reference pages (`make docs`), builds the site, and checks links and code blocks of the documents."""
