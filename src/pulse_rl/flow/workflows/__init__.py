"""The workflows in the package: one answer, solver and verifier, turns with a tool, environments of other packages."""
