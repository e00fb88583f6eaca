"""From counts to findings, and what theory predicts beside them.

`theory` derives how dense an Adam step is, `forecast` applies it to the steps of a study, `findings` makes the steps,
exponents and recurrence of a report. Nothing here reads weights.
"""
