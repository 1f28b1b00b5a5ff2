"""What a model file says, in our terms: ModelConfig, canonical weight names and shapes."""

from atlas.architectures.families import supported
from atlas.architectures.gguf_config import config_from_gguf
from atlas.architectures.huggingface_config import config_from_huggingface
from atlas.architectures.weight_names import expected_weights

__all__ = ["config_from_gguf", "config_from_huggingface", "expected_weights", "supported"]
