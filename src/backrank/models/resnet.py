"""ResNet by torchvision's blocks with the CIFAR stem: a 3x3 convolution of stride 1, no pooling in front."""

from __future__ import annotations

from omegaconf import DictConfig
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.models.resnet import ResNet as TorchvisionResNet


class ResNet(TorchvisionResNet):
    """`layers` blocks in each of four stages of width D/8, D/4, D/2, D: 2 and 512 are ResNet-18. Features are B x D."""

    counts_head = True  # the published mean holds the classifier

    def __init__(self, layers: int, width: int, channels: int):
        nn.Module.__init__(self)
        self._norm_layer, self.dilation, self.groups, self.base_width = nn.BatchNorm2d, 1, 1, 64
        self.inplanes = width // 8
        self.conv1 = nn.Conv2d(channels, self.inplanes, 3, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(self.inplanes), nn.ReLU(inplace=True)
        for i in range(4):
            setattr(self, f"layer{i + 1}", self._make_layer(BasicBlock, width * 2**i // 8, layers, 1 if i == 0 else 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for module in self.modules():  # as torchvision initialises them
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for i in range(4) for block in getattr(self, f"layer{i + 1}")]

    def stem(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)))

    def features(self, x: Tensor) -> Tensor:
        """The last block's output (B, D, H, W) -> features (B, D)."""
        return self.avgpool(x).flatten(1)

    def forward(self, x: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        x = self.stem(x)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x)
            if taps and depth in taps:  # means over space, so that a tap is N x D as elsewhere
                taps[depth] = self.features(x)
        return self.features(x)


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    return ResNet(model.layers, model.width, data.channels)
