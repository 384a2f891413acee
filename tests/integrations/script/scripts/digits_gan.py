"""Train a GAN on scikit-learn's digits, in float32, and print how far its images are from the real ones."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

NOISE = 32

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--seed", type=int, default=0)
opt = parser.parse_args()
torch.manual_seed(opt.seed)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 64, 2, 1, 0, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 1),
        )

    def forward(self, x):
        return self.main(x).squeeze(1)


def energy_distance(a, b):
    """Szekely's distance between two sets of points: 0 for equal distributions."""
    a, b = a.flatten(1), b.flatten(1)
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
netG, netD = Generator(), Discriminator()
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
for epoch in range(opt.epochs):
    for real in images[torch.randperm(len(images))].split(128):
        size = real.size(0)
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(size))
        errD_real.backward()
        fake = netG(torch.randn(size, NOISE, 1, 1))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(size))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(size))
        errG.backward()
        optimizerG.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch}: Loss_D {errD_real.item() + errD_fake.item():.3f} Loss_G {errG.item():.3f}")
netG.eval()
with torch.no_grad():
    print(f"result: {energy_distance(netG(torch.randn(1000, NOISE, 1, 1)), images):.4f}")
