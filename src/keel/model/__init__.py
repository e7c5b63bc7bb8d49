"""A host and its side streams as one Hugging Face model.

model = keel.attach(host, keel.StructuralStream())      # the first forward is the host's, bit for bit
model.generate(...); model.save_pretrained(folder); host = model.detach()
"""

from keel.model.attaching import attach, load
from keel.model.causal import KeelForCausalLM
from keel.model.config import KeelConfig, KeelOutput

__all__ = ["KeelConfig", "KeelForCausalLM", "KeelOutput", "attach", "load"]
