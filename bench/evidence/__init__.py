"""Long runs beside the papers' numbers: what is kept of a run, and the tables and pictures of docs/evidence.md."""
