"""The trainer's side: changes are found against the baseline, coded, proved, put and committed."""
