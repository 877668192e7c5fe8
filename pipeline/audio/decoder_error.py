"""The error of a decoding library that cannot go on."""

from __future__ import annotations


class DecoderError(Exception):
    """A library cannot open the bytes, or breaks while decoding.

    Args:
        reason: Its own words.
        not_audio: The bytes are nothing that it knows.
        unsupported: The container is known, and the codec in it is not.
    """

    def __init__(self, reason: str, *, not_audio: bool = False, unsupported: bool = False) -> None:
        super().__init__(reason)
        self.not_audio, self.unsupported = not_audio, unsupported
