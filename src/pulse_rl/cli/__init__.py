"""The command line. Thin: parse, call one verb, print. Nothing heavy is imported before a command runs."""
