"""
SHARP as the optimizer of a plain torch model in BF16, beside torch's Adam in BF16 and in FP32.

At a small learning rate, Adam in BF16 loses most of its updates to rounding; SHARP follows FP32.

``python examples/sharp_alone.py [--steps 500]``
"""

import argparse

import torch
from torch import nn

from sb3_fp16 import SHARP


def final_loss(optimizer: str, dtype: torch.dtype, steps: int) -> tuple[float, int]:
    """
    Fit a sine.

    :param optimizer: ``SHARP`` or ``Adam``
    :param dtype: of the weights
    :param steps: of the optimizer
    :return: mean squared error at the end, bytes of optimizer state
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).to(dtype)
    parameters = list(model.parameters())
    chosen = SHARP(parameters, lr=1e-4) if optimizer == "SHARP" else torch.optim.Adam(parameters, lr=1e-4)
    x = torch.linspace(-3, 3, 512, dtype=dtype).unsqueeze(1)
    for _ in range(steps):
        chosen.zero_grad()
        loss = (model(x).float() - torch.sin(2 * x.float())).square().mean()
        loss.backward()
        chosen.step()
    return loss.item(), sum(s.nbytes for state in chosen.state.values() for s in state.values() if s.ndim)


def main() -> None:
    """Print a line per optimizer and format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    for optimizer, dtype in (("Adam", torch.float32), ("Adam", torch.bfloat16), ("SHARP", torch.bfloat16)):
        loss, size = final_loss(optimizer, dtype, steps)
        print(f"{optimizer:<5} {dtype!s:<15} loss {loss:.2e}, optimizer state {size:,} bytes")


if __name__ == "__main__":
    main()
