"""The Dataflow: tasks out, groups in, batches on. What is handed out, kept, dropped and counted."""
