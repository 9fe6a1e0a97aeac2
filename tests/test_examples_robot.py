"""The arm is learned by the clock: what it predicts, prints and draws, not how fast."""

from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from examples import robot


def test_an_arm_is_learned_by_the_clock_as_without(tmp_path, capsys):
    motion, track, reference = robot.main(seconds=0.3, num_inducing=20, out=tmp_path)
    assert track.torque.shape == reference.shape == (150, 2)
    # Torques have a standard deviation of several Nm, their noise one of 0.3 Nm.
    for torque in (track.torque, reference):
        assert (torque - motion.torque).square().mean().sqrt() < robot.NOISE
    assert (track.work <= track.seconds.max()).all() and track.work.min() > 0
    assert (tmp_path / "robot.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "deadlines missed" in printed and "elbow" in printed


def test_torques_do_the_work_that_the_energy_of_the_arm_grows_by():
    t = torch.linspace(0, 3, 301, dtype=torch.float64).unsqueeze(-1)
    q = torch.cat([t.sin(), 1 + (2 * t).cos()], -1)
    v = torch.cat([t.cos(), -2 * (2 * t).sin()], -1)
    a = torch.cat([-t.sin(), -4 * (2 * t).cos()], -1)
    power = (robot.torques(q, v, a) * v).sum(-1)
    cos, total = q[:, 1].cos(), q.sum(-1)
    kinetic = (5 / 3 + cos) * v[:, 0] ** 2 / 2 + v[:, 1] ** 2 / 6
    kinetic += (1 / 3 + cos / 2) * v[:, 0] * v[:, 1]
    energy = kinetic + 9.81 * (1.5 * q[:, 0].sin() + total.sin() / 2)
    done = torch.trapezoid(power, t[:, 0])
    assert_close(done, energy[-1] - energy[0], rtol=1e-3, atol=1e-3)
    hanging = torch.tensor([[-math.pi / 2, 0.0]], dtype=torch.float64)
    rest = torch.zeros_like(hanging)
    assert_close(robot.torques(hanging, rest, rest), rest)
