"""The command line: thin commands over kvbus.ops and kvbus.client. Only here are typer and rich imported."""
