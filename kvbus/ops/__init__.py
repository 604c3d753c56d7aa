"""What the command line is made of: modules that return data and never print. Usable from Python as they are."""
