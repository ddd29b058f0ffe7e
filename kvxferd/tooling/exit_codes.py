"""The exit codes of the command line's verbs."""

from __future__ import annotations

EXIT_OK = 0
EXIT_WRONG_BYTES = 1  # demo: a byte is wrong, or a pull failed
EXIT_REFUSED = 1  # explain: decode cannot read from prefill
EXIT_NOT_READY = 1  # status: the daemon takes no registrations and pulls
EXIT_WORK_LEFT = 1  # drain: the daemon ended with unfinished transfers
EXIT_FAILED = 1  # doctor: something essential, or with --gpu a placement, does not work; ping: no daemon
EXIT_INVALID = 1  # config check: the daemon would refuse the file
EXIT_ERROR = 2  # every verb: an error, the same as click's own usage errors
EXIT_NO_GPU = 3  # doctor --gpu: there is no GPU
EXIT_INTERRUPTED = 130  # demo and bench: a signal, as a shell reports SIGINT
