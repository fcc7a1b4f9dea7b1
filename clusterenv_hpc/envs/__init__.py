"""Environments: their spaces as typed arrays, and the vector environments that workers step."""

from .build import AutoresetModeLike, EnvError, EnvSource, build_vector_env
from .spaces import SpaceError, decode_space, encode_space, join, leaves, split

__all__ = [
    "AutoresetModeLike",
    "EnvError",
    "EnvSource",
    "SpaceError",
    "build_vector_env",
    "decode_space",
    "encode_space",
    "join",
    "leaves",
    "split",
]
