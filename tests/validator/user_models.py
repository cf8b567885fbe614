"""Models of a user's own, as factories: what no configuration of a library describes."""

import os
import signal
import time

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


def cnn(width=16):
    """Convolutions, batch norm (buffers), an in-place op, pooling and dropout."""
    net = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width, 10),
    )
    return Classifier(net), lambda batch, seq: {
        "x": torch.randn(batch * 8, 3, 32, 32),
        "y": torch.zeros(batch * 8, dtype=torch.long),
    }


class Shared(nn.Module):
    """A layer used twice, an output tied to the embedding, a frozen layer, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(301, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.block = nn.Linear(64, 64)
        self.again = self.block
        self.head = nn.Linear(64, 301, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(64))

    def forward(self, ids):
        hidden = self.embedding(ids) * self.scale
        hidden = self.again(F.gelu(self.block(self.frozen(hidden))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def shared():
    return Shared(), lambda batch, seq: {"ids": torch.arange(batch * seq).reshape(batch, seq) % 301}


def several_forwards():
    """A step of the user's own that runs the module three times."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 64))

    def step(module, batch):
        first = module(batch["x"])
        second = module(batch["x"].flip(0) + first.detach() * 0.1)
        return ((first - second) ** 2).mean() + module(first).abs().mean()

    return net, lambda batch, seq: {"x": torch.randn(batch * seq, 64)}, step


def unused_layer():
    """A layer that the step never reaches: it trains in name only."""
    model, batch = shared()
    model.spare = nn.Linear(64, 4096)
    return model, batch


def scalar_loss():
    return nn.Linear(8, 1), lambda batch, seq: {"input": torch.randn(batch, 8)}, lambda module, b: module(**b).mean()


def raises():
    raise ValueError("no such table:\n  weights")


def exits():
    os._exit(3)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


class _OnlyOnRank0(Shared):
    def forward(self, ids):
        if os.environ.get("RANK", "0") != "0":
            raise RuntimeError("no card here")
        return super().forward(ids)


def only_rank_0():
    """The tied model, which runs in the first process only."""
    return _OnlyOnRank0(), lambda batch, seq: {"ids": torch.randint(0, 301, (batch, seq))}
