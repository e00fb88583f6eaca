"""Pages and charts in one file that needs no network, for whoever shows something: a run, a study."""
