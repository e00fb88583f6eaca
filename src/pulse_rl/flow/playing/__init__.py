"""What is played: workflows over policies and tools, their turns recorded as tokens."""
