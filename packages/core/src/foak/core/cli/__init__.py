"""The command `foak`: one module for each subcommand, loaded when it is called."""
