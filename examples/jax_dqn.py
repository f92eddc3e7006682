"""DQN on CartPole with JAX: the buffer's tensors become JAX arrays without a copy."""

import sys

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import trajstore

URL = sys.argv[1] if len(sys.argv) > 1 else "runs/jax-dqn"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 3_000
GAMMA, RATE, SIZES = 0.98, 1e-3, (4, 64, 64, 2)


def new_parameters(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        (jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, jnp.zeros(m))
        for k, n, m in zip(keys, SIZES[:-1], SIZES[1:])
    ]


def values(parameters, x):
    for weight, bias in parameters[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = parameters[-1]
    return x @ weight + bias


@jax.jit
def learn(parameters, moments, target, batch, t):
    def loss(parameters):
        after = values(target, batch["next_observation"]).max(1)
        goal = batch["reward"] + GAMMA * ~batch["terminated"] * after
        q = jnp.take_along_axis(values(parameters, batch["observation"]), batch["action"][:, None], 1)[:, 0]
        return ((q - goal) ** 2).mean()

    def adam(p, g, m):
        first, second = 0.9 * m[0] + 0.1 * g, 0.999 * m[1] + 0.001 * g**2
        step = first / (1 - 0.9**t) / (jnp.sqrt(second / (1 - 0.999**t)) + 1e-8)
        return p - RATE * step, (first, second)

    gradients, structure = jax.tree.flatten(jax.grad(loss)(parameters))
    pairs = [adam(p, g, m) for p, g, m in zip(jax.tree.leaves(parameters), gradients, moments)]
    return jax.tree.unflatten(structure, [p for p, _ in pairs]), [m for _, m in pairs]


def to_jax(batch):
    tensors = {name: batch[name] for name in ("observation", "action", "reward", "terminated")}
    tensors["next_observation"] = batch["next"]["observation"]
    return {name: jnp.from_dlpack(tensor) for name, tensor in tensors.items()}


env, rng = gym.make("CartPole-v1"), np.random.default_rng(0)
parameters = target = new_parameters(jax.random.key(0))
moments = [(jnp.zeros_like(p), jnp.zeros_like(p)) for p in jax.tree.leaves(parameters)]
act = jax.jit(lambda parameters, x: values(parameters, x).argmax())
observation, _ = env.reset(seed=0)
windows = trajstore.Windows.transitions()
with trajstore.ReplayBuffer(URL, exist="fail", capacity=100_000, sample=windows, seed=0) as buffer:
    for t in range(STEPS):
        is_random = rng.random() < max(0.05, 1 - t / 1_500)
        action = int(rng.integers(2)) if is_random else int(act(parameters, observation))
        following, reward, terminated, truncated, _ = env.step(action)
        step = {"observation": observation, "action": np.int32(action), "reward": np.float32(reward)}
        buffer.append(step, terminated=terminated, truncated=truncated, final={"observation": following})
        observation = env.reset()[0] if terminated or truncated else following
        if t > 500:
            parameters, moments = learn(parameters, moments, target, to_jax(buffer.sample(64)), t)
        if t % 100 == 0:
            target = parameters

returns = trajstore.open(URL).episodes["return"]
assert returns[-10:].mean() > 1.5 * returns[:10].mean(), "it has learned to balance"
print(f"{len(returns)} episodes, returns {returns[:10].mean():.0f} -> {returns[-10:].mean():.0f}")
