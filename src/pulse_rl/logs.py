"""The loggers of pulse-rl, below `pulse_rl`. What they report is one printable line.

A message may carry a tensor's or an object's name, or a server's answer. Whoever chose those must not reach the
terminal of the one who reads the log: a control character could erase a warning, or forge another line.
"""

import logging

from pulse_rl.errors import printable


def logger(name: str) -> logging.Logger:
    """The logger of a module. A filter of a logger does not see what the loggers below it report: each has its own."""
    found = logging.getLogger(name)
    found.addFilter(_make_printable)
    return found


def _make_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True
