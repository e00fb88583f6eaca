"""Findings from counts, and theory's predictions.

`theory` derives how dense an Adam step is, `forecast` applies it to the steps of a study, `findings` makes the steps,
exponents and recurrence of a report. Nothing here reads weights.
"""
