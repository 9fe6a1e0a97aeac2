"""Several outputs behind one multitask interface."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
)

from torch_ssgp import GreedyInformation, StreamingGP, UpdateOptions, exceptions
from torch_ssgp.multioutput import MultiOutputGP


def kernel(batch_shape=()):
    batch_shape = torch.Size(batch_shape)
    return ScaleKernel(RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape)


def two_outputs(likelihood=None, num_inducing=12):
    shape = torch.Size([2])
    model = StreamingGP(
        kernel(shape), likelihood, num_inducing=num_inducing, batch_shape=shape
    )
    return MultiOutputGP(model.double())


def data(num=40):
    x = torch.rand(num, 1, dtype=torch.float64) * 5
    y = torch.cat([x.sin(), 100 * x.cos()], -1)
    return x, y + 0.1 * y.std(0) * torch.randn_like(y)


def test_outputs_are_those_of_separate_models():
    x, y = data()
    model = two_outputs()
    alone = [StreamingGP(kernel(), num_inducing=12).double() for _ in range(2)]
    for part in torch.arange(40).chunk(2):
        result = model.update(x[part], y[part], num_steps=0)
        for i, one in enumerate(alone):
            expected = one.update(x[part], y[part, i], num_steps=0)
            torch.testing.assert_close(result.bound[i], expected.bound)
    for i, one in enumerate(alone):
        torch.testing.assert_close(model(x).mean[:, i], one(x).mean)
        torch.testing.assert_close(model(x).variance[:, i], one(x).variance)


def test_outputs_are_those_of_the_batch():
    x, y = data()
    model = two_outputs(num_inducing=5)
    model.update(x, y, num_steps=0)
    one = model.model(x)
    for multitask in (model(x), model.predict(x)):
        assert multitask.event_shape == (40, 2)
        torch.testing.assert_close(multitask.mean, one.mean.mT)
    torch.testing.assert_close(model(x).variance, one.variance.mT)
    for predict in (model, model.predict):
        with pytest.warns(DeprecationWarning, match="Leave it out"):
            again = predict(x, from_memory=True)
        torch.testing.assert_close(again.mean, one.mean.mT)


def test_outputs_learn_their_own_scale():
    x, y = data(80)
    model = two_outputs()
    model.update(x, y, num_steps=40)
    relative = (model(x).mean - y).square().mean(0).sqrt() / y.std(0)
    assert (relative < 0.15).all()
    noise = model.likelihood.noise.squeeze(-1).sqrt() / y.std(0)
    torch.testing.assert_close(noise, torch.full_like(noise, 0.1), rtol=0.5, atol=0)


def test_posteriors_are_multitask():
    x, y = data()
    model = two_outputs()
    model.update(x, y, num_steps=2)
    for distribution in (model(x[:7]), model.predict(x[:7])):
        assert isinstance(distribution, MultitaskMultivariateNormal)
        assert distribution.event_shape == (7, 2)
        assert distribution.rsample(torch.Size([3])).shape == (3, 7, 2)
    assert (model.predict(x).variance > model(x).variance).all()


def test_conditioning_takes_batches_of_fantasies():
    x, y = data()
    model = two_outputs()
    model.update(x, y, num_steps=0)
    x_new = torch.rand(3, 4, 1, dtype=torch.float64) * 5
    y_new = torch.randn(3, 4, 2, dtype=torch.float64)
    many = model.condition_on_observations(x_new, y_new)
    one = model.condition_on_observations(x_new[1], y_new[1])
    assert many(x).mean.shape == (3, 40, 2)
    torch.testing.assert_close(many(x).mean[1], one(x).mean)
    assert model.model.num_data == 40


def test_a_look_without_gradients_leaves_those_of_a_fantasy():
    x, y = data()
    model = two_outputs()
    model.update(x, y, num_steps=0)
    gradients = []
    for grad in (True, False):
        x_new = x[:2].clone().add(0.1).requires_grad_()
        fantasy = model.condition_on_observations(x_new, y[:2])
        with torch.set_grad_enabled(grad):
            fantasy(x)
        fantasy(x).mean.sum().backward()
        gradients.append(x_new.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_mode_of_autograd_will_do(mode):
    x, y = data()
    model, expected = two_outputs(), two_outputs()
    expected.update(x, y, num_steps=3)
    with mode():
        model.update(x.clone(), y.clone(), num_steps=3)
        model.predict(x)
    points = x.clone().requires_grad_()
    model(points).mean.sum().backward()
    assert torch.equal(model(x).mean, expected(x).mean)
    model.update(points, y, num_steps=0)


def test_noise_has_one_column_per_output():
    x, y = data()
    likelihood = FixedNoiseGaussianLikelihood(torch.ones(2, 1, dtype=torch.float64))
    model = two_outputs(likelihood)
    # The outputs share the number of points: not one that follows their noises.
    model.model.inducing_policy = GreedyInformation()
    noise = torch.tensor([1e-2, 1e2], dtype=torch.float64).expand(40, 2)
    model.update(x, y, noise, num_steps=0)
    expected = StreamingGP(kernel(), likelihood, num_inducing=12).double()
    expected.inducing_policy = GreedyInformation()
    expected.update(x, y[:, 1].contiguous(), noise[:, 1].contiguous(), num_steps=0)
    torch.testing.assert_close(model(x).mean[:, 1], expected(x).mean)


def test_labels_of_several_outputs():
    x, y = data()
    model = two_outputs(BernoulliLikelihood())
    labels = (y > 0).long()
    model.update(x, labels, num_steps=5)
    right = (model(x).mean > 0) == labels.bool()
    assert right.double().mean() > 0.85


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (2, 40)])
def test_targets_of_another_shape_are_refused(shape):
    x, _ = data()
    with pytest.raises(exceptions.ShapeError, match=r"expected \(n, 2\)"):
        two_outputs().update(x, torch.zeros(shape, dtype=torch.float64))


def test_models_without_outputs_are_refused():
    with pytest.raises(exceptions.ArgumentError, match="batch_shape"):
        MultiOutputGP(StreamingGP(kernel()))
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    classes = StreamingGP(kernel(), likelihood, batch_shape=torch.Size([2]))
    with pytest.raises(exceptions.UnsupportedLikelihoodError, match="one label"):
        MultiOutputGP(classes)


def test_state_is_saved_and_loaded():
    x, y = data()
    model = two_outputs()
    model.update(x, y, num_steps=2)
    other = two_outputs()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x).mean, model(x).mean)


def test_every_option_of_an_update_is_taken():
    x, y = data()
    model = two_outputs()
    for field in fields(UpdateOptions):
        option = {field.name: getattr(UpdateOptions(num_steps=0), field.name)}
        model.update(x, y, **{"num_steps": 0, **option})


def test_options_reach_the_model():
    x, y = data()
    z = torch.linspace(0, 5, 7).double().unsqueeze(-1)
    model, steps = two_outputs(), []
    result = model.update(
        x, y, num_steps=3, inducing_points=z, callback=lambda *step: steps.append(step)
    )
    assert len(steps) == 3 and result.num_inducing == 7


def test_each_output_may_forget_what_it_has_to():
    x, y = data(60)
    model = two_outputs()
    model.update(x[:40], y[:40], num_steps=30)
    y[40:, 0] = 10 - 3 * y[40:, 0]
    result = model.update(x[40:], y[40:], forget="auto", num_steps=20)
    assert result.forgot[0] < 0.5 and result.forgot[1] == 1


def test_an_unknown_option_is_named_with_those_that_exist():
    x, y = data()
    with pytest.raises(exceptions.UnknownOptionError, match="num_steps") as error:
        two_outputs().update(x, y, num_step=3)
    assert isinstance(error.value, TypeError)
    assert "has no option 'num_step'. Did you mean" in str(error.value)
    assert "learn_hyperparameters" in str(error.value)


def test_warnings_point_at_the_line_of_the_caller():
    x = torch.linspace(0, 50, 200).double().unsqueeze(-1)
    model = two_outputs(num_inducing=4)
    with pytest.warns(exceptions.BudgetWarning) as caught:
        model.update(x, torch.cat([x.sin(), x.cos()], -1), num_steps=0)
    assert {warning.filename for warning in caught} == {__file__}


def test_an_update_waits_for_its_turn():
    x, y = data()
    model = two_outputs()

    def change(*step):
        model.update(x, y, num_steps=0)

    with pytest.raises(exceptions.ArgumentError, match="in the middle of an update"):
        model.update(x, y, num_steps=1, callback=change)
