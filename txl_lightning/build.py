"""Where model, memory and data meet: the rules that span them."""

from __future__ import annotations

from txl_lightning.config import Config, ConfigError
from txl_lightning.data.store import Meta


def check_vocabulary(config: Config, meta: Meta) -> None:
    """The model has exactly the data's symbols.

    Raises:
        ConfigError: it has not.
    """
    if config.model.vocab_size != meta.vocab_size:
        rule = f"the data has {meta.vocab_size} symbols ({meta.vocab_name})"
        raise ConfigError("model.vocab_size", config.model.vocab_size, rule, f"set it to {meta.vocab_size}")
