"""The exceptions that carry a sentence for the person at the keyboard."""


class NormforgeError(Exception):
    """Bad input or an unusable file: one sentence that says what, where and what to do.

    The command line prints the sentence without a traceback and exits with code 2.
    """


def one_line(error: object, length: int | None = None) -> str:
    """Return an error's message as one line of at most `length` characters."""
    return " ".join(str(error).split())[:length]


class CompilerError(NormforgeError):
    """NVRTC itself does not work, whatever the kernel."""


class CompilerFailedError(CompilerError):
    """NVRTC failed for a reason that is not in the source, such as a lack of memory: another try
    may succeed."""


class ProblemError(NormforgeError):
    """One problem cannot be finished now; its finished trials are kept, and others may go on."""
