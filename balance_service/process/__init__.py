"""This process and what it runs on: its clock, its interpreter, Java, jars and shipped files."""
