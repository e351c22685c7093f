"""The command line: one file a command. Knows the library's front door, not what lies behind it."""
