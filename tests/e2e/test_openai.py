"""The OpenAI front end in front of a real server, through the official client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import httpx
import openai
import pytest
from serving import Deployment, engine_pid, front_end

KEY = "secret"


@pytest.fixture(scope="module")
def url(shared_deployment: Deployment) -> Iterator[str]:
    """A front end with an API key."""
    with front_end(shared_deployment, api_key=KEY) as url:
        yield url


@pytest.fixture
def client(url: str, deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_models_and_health(url: str, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["llama"]
    assert httpx.get(f"{url}/health", timeout=10).json() == {"ready": True}
    assert "distserve_ready 1" in httpx.get(f"{url}/metrics", timeout=10).text


def test_streamed_chat_concatenates_to_the_whole_one(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    options = {"model": "llama", "messages": messages, "max_tokens": 24, "temperature": 0.7, "seed": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_prompt_lists_n_and_logprobs(client: openai.OpenAI) -> None:
    result = client.completions.create(
        model="llama",
        prompt=["ab", "cd"],
        n=2,
        max_tokens=5,
        seed=1,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert result.choices[0].text != result.choices[1].text
    for choice in result.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == 5
        assert all(value <= 0 for value in choice.logprobs.token_logprobs or [])
    assert result.usage is not None
    assert result.usage.completion_tokens == 20


def test_chat_logprobs(client: openai.OpenAI) -> None:
    result = client.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    content = result.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)  # greedy


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(model="llama", prompt="abc", max_tokens=30, temperature=0)
    stop = free.choices[0].text[4:6]
    stopped = client.completions.create(model="llama", prompt="abc", max_tokens=30, temperature=0, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.split(stop)[0]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"extra_body": {"max_token": 1}}),
        (openai.BadRequestError, {"prompt": [[999999]]}),
        (openai.NotFoundError, {"model": "other"}),
    ],
)
def test_refusals(client: openai.OpenAI, error: type[Exception], options: dict[str, object]) -> None:
    for stream in (False, True):
        with pytest.raises(error):
            client.completions.create(**{"model": "llama", "prompt": "a", "stream": stream, **options})  # type: ignore[call-overload]


def test_wrong_key_and_broken_body(url: str, client: openai.OpenAI) -> None:
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{url}/v1/completions", content=b"{", headers=headers, timeout=10)
    assert reply.status_code == 400
    assert "not JSON" in reply.json()["error"]["message"]


def test_64_clients_at_once(url: str, deployment: Deployment) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="llama", prompt=[i % 50 + 10] * 20, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    texts = asyncio.run(everyone())
    assert texts[:14] == texts[50:]


NOTICED_S = 1.0  # for the front end to see it before the decode instance, which needs half a second for all


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(url: str, deployment: Deployment, stream: bool) -> None:
    body = {
        "model": "llama",
        "prompt": "abc",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
        "n": 20,
    }
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    before, decode = ended(url), engine_pid(deployment, "decode_0")
    os.kill(decode, signal.SIGSTOP)  # they are under way when the client leaves
    try:
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            if stream:
                assert connection.getresponse().readline().startswith(b"data: ")
            deadline = time.monotonic() + 20
            while not deployment.status()["requests"]:
                assert time.monotonic() < deadline
        time.sleep(NOTICED_S)
    finally:
        os.kill(decode, signal.SIGCONT)
    deployment.wait_idle()
    deadline = time.monotonic() + 20
    while not (since := ended(url) - before)["cancelled"]:  # metrics come a little later
        assert time.monotonic() < deadline, since
        time.sleep(0.05)


def ended(url: str) -> Counter[str]:
    """Requests by outcome, as the metrics have them."""
    page = httpx.get(f"{url}/metrics", timeout=10).text
    found = re.findall(r'^distserve_requests_total\{.*?outcome="(\w+)".*?\} (\d+)', page, re.MULTILINE)
    outcomes: Counter[str] = Counter()
    for outcome, count in found:
        outcomes[outcome] += int(count)
    return outcomes
