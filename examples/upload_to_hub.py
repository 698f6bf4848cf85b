"""
Put a trained model on the Hugging Face Hub, as a file that SB3's own PPO loads, too.

``pip install huggingface_hub``, ``hf auth login``, then
``python examples/upload_to_hub.py model.zip user/ppo-fp16-Hopper-v5 [--env Hopper-v5]``
"""

import argparse
import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from sb3_fp16 import PPOFP16

CARD = """---
library_name: stable-baselines3
tags: [reinforcement-learning, stable-baselines3, sb3_fp16, {env}]
---
# PPO in half precision on {env}

Trained with sb3_fp16, precision `{precision}`. Both load it:

```python
from stable_baselines3 import PPO  # in FP32, without sb3_fp16
from sb3_fp16 import PPOFP16  # in the precision it was trained in
```
"""


def main() -> None:
    """Upload the model and a card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="saved by PPOFP16")
    parser.add_argument("repository", help="user/name")
    parser.add_argument("--env", default="unknown", help="that it was trained in")
    arguments = parser.parse_args()
    model = PPOFP16.load(arguments.model, device="cpu")  # refuses what is damaged before anything is uploaded
    api = HfApi()
    api.create_repo(arguments.repository, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "README.md").write_text(CARD.format(env=arguments.env, precision=model.precision.name))
        model.save(Path(folder) / "model.zip")
        address = api.upload_folder(repo_id=arguments.repository, folder_path=folder)
    print(address)


if __name__ == "__main__":
    main()
