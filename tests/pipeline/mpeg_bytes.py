"""MPEG audio frames and tags byte by byte, from ISO/IEC 11172-3 2.4.1.3 and 13818-3, ID3v2.4.

The tables are those of the standard; nothing here comes from an encoder or the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

# Name -> version bits, rates in Hz by index, kbit/s of layer III by index 1 to 14, samples a frame.
MPEG = {
    "1": (3, (44100, 48000, 32000), "32 40 48 56 64 80 96 112 128 160 192 224 256 320", 1152),
    "2": (2, (22050, 24000, 16000), "8 16 24 32 40 48 56 64 80 96 112 128 144 160", 576),
    "2.5": (0, (11025, 12000, 8000), "8 16 24 32 40 48 56 64 80 96 112 128 144 160", 576),
}
STEREO, JOINT, DUAL, MONO = range(4)


@dataclass(frozen=True)
class Kind:
    """What one layer III frame header says; no checksum."""

    version: str = "1"
    rate: int = 0
    bitrate: int = 9
    mode: int = MONO
    padding: int = 0

    @property
    def rate_hz(self) -> int:
        return MPEG[self.version][1][self.rate]

    @property
    def samples(self) -> int:
        return MPEG[self.version][3]

    @property
    def nbytes(self) -> int:
        """N = floor(samples / 8 * bitrate / rate) + padding, in bytes (11172-3 2.4.3.1)."""
        kbits = int(MPEG[self.version][2].split()[self.bitrate - 1])
        return int(self.samples / 8 * kbits * 1000 / self.rate_hz) + self.padding

    @property
    def side_bytes(self) -> int:
        """Side information: 32 or 17 bytes (mono) in MPEG 1, 17 or 9 in its extensions."""
        sizes = (32, 17) if self.version == "1" else (17, 9)
        return sizes[self.mode == MONO]

    def header(self, *, layer: int = 1, crc: bool = False) -> bytes:
        """Sync 11 bits, version 2, layer 2, no-CRC 1, bitrate 4, rate 2, padding 1, private 1,
        mode 2, extension 2, copyright 1, original 1, emphasis 2."""
        bits = f"{0x7FF:011b}{MPEG[self.version][0]:02b}{layer:02b}{not crc:01b}"
        bits += f"{self.bitrate:04b}{self.rate:02b}{self.padding:01b}0{self.mode:02b}000000"
        return int(bits, 2).to_bytes(4, "big")

    def frame(self, fill: int = 0) -> bytes:
        """A frame of silence: side information and data of zeros."""
        return self.header().ljust(self.nbytes, bytes([fill]))

    def tag_frame(
        self, name: bytes, frames: int | None, nbytes: int | None = None, *, at: int | None = None
    ) -> bytes:
        """A frame that holds a Xing or Info tag: flags, then what they announce."""
        flags = (frames is not None) | (nbytes is not None) << 1
        tag = name + flags.to_bytes(4, "big")
        tag += b"" if frames is None else frames.to_bytes(4, "big")
        tag += b"" if nbytes is None else nbytes.to_bytes(4, "big")
        start = 4 + self.side_bytes if at is None else at
        return (self.header() + bytes(start - 4) + tag).ljust(self.nbytes, b"\0")

    def vbri_frame(self, frames: int, nbytes: int) -> bytes:
        """Fraunhofer's tag, 32 bytes behind the header: version, delay, quality, bytes, frames."""
        tag = b"VBRI" + b"\0\1" + bytes(4) + nbytes.to_bytes(4, "big") + frames.to_bytes(4, "big")
        return (self.header() + bytes(32) + tag).ljust(self.nbytes, b"\0")


def id3(payload: bytes, *, footer: bool = False) -> bytes:
    """An ID3v2 tag: the size in four groups of seven bits, a footer that repeats the header."""
    size = bytes(len(payload) >> shift & 0x7F for shift in (21, 14, 7, 0))
    head = bytes([4, 0, 0x10 if footer else 0]) + size
    return b"ID3" + head + payload + (b"3DI" + head if footer else b"")


ID3V1 = b"TAG" + b"title".ljust(125, b"\0")
EVERY_KIND = [
    Kind(version, rate, bitrate, mode)
    for version in MPEG
    for rate in range(3)
    for bitrate in range(1, 15)
    for mode in (STEREO, MONO)
]
