"""What every part of a capture needs: its error."""

from emulated.basics import ScriptError


class CaptureError(ScriptError):
    """A capture that cannot go on; the message says what was being done and what to do about it."""
