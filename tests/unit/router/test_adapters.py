"""Further names and LoRA adapters of a manifest's model, from the worker's command to the router's answer."""

import orjson
import pytest

from penstock.api import GraphSpec, Role
from penstock.api.enums import Environment, Tier
from penstock.core.errors import ConfigError
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.engine.serve.words import adapter_seed
from penstock.router.proxy.completion import RequestRefused, parse_completion
from penstock.router.proxy.prefix import read_prompt
from penstock.runtimes import RuntimeContext, runtime_of
from penstock.runtimes.engine_flags import names_answered

SERVICES = {"worker": {"role": "aggregated"}, "router": {"role": "router"}}
ADAPTERS = [{"name": "sql", "path": "/adapters/sql"}, {"name": "law", "path": "acme/law-lora"}]


def _spec(runtime="vllm", adapters=ADAPTERS, **more):
    model = {"name": "meta-llama/Llama-3.1-8B-Instruct", "servedName": "llama", "adapters": adapters}
    return GraphSpec.model_validate({"runtime": runtime, "model": model, "services": SERVICES, **more})


def _asked(model, **more):
    raw = orjson.dumps({"model": model, "prompt": "select " * 200, **more})
    return parse_completion(
        "/v1/completions",
        b"application/json",
        raw,
        model="llama",
        aliases=("llama-fast",),
        adapters=("sql", "law"),
    )


def test_workers_load_every_adapter():
    """The engine vLLM takes them as one list, the simulated engine one flag each; all may share a batch."""
    context = RuntimeContext("python", "graph.yaml", "kubernetes", "n", environment=Environment.KUBERNETES)
    spec = _spec()
    argv = runtime_of("vllm").worker(spec, spec.services["worker"], context).argv
    at = argv.index("--lora-modules")
    assert argv[at + 1 : at + 3] == ("sql=/adapters/sql", "law=acme/law-lora")
    assert argv[argv.index("--max-loras") + 1] == "2"
    spec = _spec("simulated")
    argv = runtime_of("simulated").worker(spec, spec.services["worker"], context).argv
    assert argv.count("--lora-modules") == 2


@pytest.mark.parametrize(
    ("adapters", "more", "problem"),
    [
        ([{"name": "llama", "path": "/a"}], {}, "llama is already the model's own name"),
        (ADAPTERS * 2, {}, r"sql is already that of model.adapters\[0\].name"),
        (
            [{"name": "fast", "path": "/a"}],
            {"router": {"tiers": {"enabled": True, "models": {"fast": Tier.PREMIUM}}}},
            "fast is already a name of router.tiers.models",
        ),
    ],
)
def test_a_name_stands_once(adapters, more, problem):
    """Which of two a client gets would be chance."""
    with pytest.raises(ValueError, match=problem):
        _spec(adapters=adapters, **more)


def test_a_runtime_that_loads_none_refuses_them():
    """An option without effect is not an option."""
    with pytest.raises(
        ValueError, match=r"model\.adapters: given, but workers of runtime dynamo answer to one"
    ):
        _spec("dynamo")


def test_the_router_knows_the_names_and_says_them():
    """A client that errs reads what there is."""
    assert _asked("sql").adapter == "sql"
    assert _asked("llama").adapter is _asked("llama-fast").adapter is None
    with pytest.raises(
        RequestRefused, match="'nosql' does not exist; this router serves 'llama', 'llama-fast', 'sql', 'law'"
    ):
        _asked("nosql")


def test_prompts_of_two_adapters_share_no_prefix():
    """A worker that holds a prompt's KV for one adapter has nothing of it for another, so affinity must not say so."""
    chains = {model: read_prompt(_asked(model)).chain for model in ("llama", "llama-fast", "sql", "law")}
    assert chains["llama"] == chains["llama-fast"]
    assert len({chain[0] for chain in chains.values()}) == 3
    salted = read_prompt(_asked("sql", cache_salt="a")).chain
    assert salted[0] not in {chain[0] for chain in chains.values()}
    assert read_prompt(_asked("llama", cache_salt="sql")).chain != chains["sql"]


def test_a_simulated_adapter_answers_in_its_own_words_with_its_own_cache():
    """So that a test sees whom a request reached; an unknown name is refused as by vLLM."""
    settings = resolve(ServeFlags("llama", lora_modules=("sql=/adapters/sql",)))

    def answer(model):
        return parse(
            orjson.dumps({"model": model, "prompt": "abcdefgh" * 32}), settings, api=Api.COMPLETIONS
        )[0]

    base, sql = answer("llama"), answer("sql")
    assert (base.adapter, sql.adapter) == (None, "sql")
    assert base.text(4) != sql.text(4)
    keys = [prefix_keys(each.prompt, 16, seed=adapter_seed(each.adapter)) for each in (base, sql)]
    assert set(keys[0]).isdisjoint(keys[1])


@pytest.mark.parametrize("module", ["sql", "=a", "llama=/a"])
def test_a_malformed_module_is_refused(module):
    """The worker would answer to a name that nobody meant."""
    with pytest.raises(ConfigError, match="--lora-modules"):
        resolve(ServeFlags("llama", lora_modules=(module,)))


def test_roles_of_a_disaggregated_graph_all_load_them():
    """KV of an adapter's prompt is computed by the one and read by the other."""
    services = {"p": {"role": "prefill"}, "d": {"role": "decode"}, "router": {"role": "router"}}
    spec = _spec(services=services)
    context = RuntimeContext("python", "graph.yaml", "kubernetes", "n", environment=Environment.KUBERNETES)
    for name in ("p", "d"):
        assert spec.services[name].role is not Role.ROUTER
        assert "--enable-lora" in runtime_of("vllm").worker(spec, spec.services[name], context).argv


def test_workers_answer_to_every_alias():
    """So that clients of the old name and of the new one are served while a model is renamed."""
    context = RuntimeContext("python", "graph.yaml", "kubernetes", "n", environment=Environment.KUBERNETES)
    for runtime in ("vllm", "simulated"):
        spec = _spec(runtime)
        spec = spec.model_copy(
            update={"model": spec.model.model_copy(update={"aliases": ("llama-3", "chat")})}
        )
        argv = runtime_of(runtime).worker(spec, spec.services["worker"], context).argv
        assert list(names_answered(argv)) == ["llama", "llama-3", "chat", "sql", "law"]
