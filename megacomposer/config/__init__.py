"""Configuration: the `Config` base class of every frozen settings dataclass."""

from megacomposer.config.base import Config as Config
