"""Vision transformer by torchvision, without its zero-initialised classifier: the head is the task's."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer


class ViT(VisionTransformer):
    counts_head = True  # the published mean holds the classifier; the patch embedding is not counted

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.encoder.layers)

    def stem(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) -> tokens in front of the first block (B, 1 + patches, D)."""
        x = self._process_input(x)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.encoder.dropout(x + self.encoder.pos_embedding)

    def features(self, x: Tensor) -> Tensor:
        """The last block's output -> the normed class token (B, D)."""
        return self.encoder.ln(x)[:, 0]

    def forward(self, x: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        x = self.stem(x)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x)
            if taps and depth in taps:
                taps[depth] = x[:, 0]
        out = self.features(x)
        if taps and len(self.blocks) in taps:
            taps[len(self.blocks)] = out
        return out


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    vit = ViT(
        image_size=data.size,
        patch_size=model.patch,
        num_layers=model.layers,
        num_heads=model.heads,
        hidden_dim=model.width,
        mlp_dim=model.mlp or 4 * model.width,
        num_classes=1,
    )
    if data.channels != 3:  # drawn as torchvision draws it
        vit.conv_proj = nn.Conv2d(data.channels, model.width, model.patch, model.patch)
        nn.init.trunc_normal_(vit.conv_proj.weight, std=(data.channels * model.patch**2) ** -0.5)
        nn.init.zeros_(vit.conv_proj.bias)
    del vit.heads
    return vit
