"""Folders: a directory of Hugging Face checkpoints that follows a history, and a history that follows such a directory.

For engines and trainers that only know folders. What is proved, and how bytes travel, is the subscriber's and the
publisher's; here is what a directory holds, what of it is finished, and which folder is the current one.
"""
