"""The scoring service: it answers what predict writes, and refuses what it must."""

from __future__ import annotations

import json
import math
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from command import Command
from hospitals import read

from bpfed._util.errors import UserError
from bpfed.runs.run import Run

pytest.importorskip("starlette", reason="the service is the extra 'serve'")
pytest.importorskip("httpx", reason="the service is tested by httpx")

from starlette.testclient import TestClient

from bpfed.serve.service import MOST_BYTES, MOST_ROWS, STATIC, Service, make_app, read_token, server

ROW = {"age": 71.5, "dose": 0.25, "ward": "east"}
TOKEN = "a-token-of-many-letters"


@pytest.fixture(scope="module")
def service(classes: Path) -> Service:
    return Service(Run.load(classes / "run").client("bern"), abstain=0.99)


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return TestClient(make_app(service), base_url="http://127.0.0.1:8000")


def asked(client: TestClient, rows: Any, **more: Any) -> Any:
    return client.post("/predict", json={"rows": rows}, **more)


def test_the_service_answers_what_the_command_writes_to_the_digit(
    ward: Path, client: TestClient, command: Command
) -> None:
    given = read((ward / "new.csv").read_text())
    rows = [{"age": float(r["age"]), "dose": float(r["dose"]), "ward": r["ward"]} for r in given]
    rows.append({"age": 900.0, "dose": None, "ward": "north"})
    (ward / "rows.csv").write_text(
        "age,dose,ward\n" + "".join(f"{r['age']},{'' if r['dose'] is None else r['dose']},{r['ward']}\n" for r in rows)
    )
    written = read(command("predict", "run", "--client", "bern", "--input", "rows.csv", "--abstain", "0.99").out)
    answered = asked(client, rows).json()["rows"]
    for cells, answer in zip(written, answered, strict=True):
        assert {each["column"] for each in answer.pop("unusual")} == set(
            filter(None, cells.pop("unusual").split(" | "))
        )
        assert {name: value if isinstance(value, str) else f"{value:.6g}" for name, value in answer.items()} == cells
    assert asked(client, rows[-1:]).json()["rows"][0]["abstain"] == "yes"


def test_intervals_of_numbers_are_answered_in_their_unit(numbers: Path) -> None:
    run = Run.load(numbers / "run")
    with TestClient(make_app(Service(run.client("zug"))), base_url="http://localhost:8000") as client:
        (row,) = asked(client, [ROW]).json()["rows"]
    assert row["low(0.9)"] < row["mean"] < row["high(0.9)"]
    assert math.isclose(row["sd"] ** 2, row["epistemic"] ** 2 + row["aleatoric"] ** 2, rel_tol=1e-4)


def test_the_schema_says_what_a_row_has(client: TestClient) -> None:
    schema = client.get("/schema").json()
    assert [(c["name"], c["kind"], c["words"]) for c in schema["columns"]] == [
        ("age", "number", []),
        ("dose", "number", []),
        ("ward", "words", ["east", "west"]),
    ]
    low, high = schema["columns"][0]["usual"]
    assert 30 < low < 60 < high < 90
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "has no rows"),
        ({"age": 1}, "has no rows"),
        ([5], "Row 1 is not an object"),
        ([ROW, {**ROW, "agee": 1}], "Row 2 has the column 'agee', which the model does not use; did you mean 'age'?"),
        ([{"age": 1, "dose": 2}], "Row 1 has no 'ward'"),
        ([{**ROW, "age": "71"}], "Column 'age' of row 1 must be a number or null, but is a text"),
        ([{**ROW, "age": True}], "must be a number or null, but is true or false"),
        ([{**ROW, "age": [1]}], "is a list or an object"),
        ([{**ROW, "age": 10**400}], "too large a number"),
        ([{**ROW, "age": 1e200}], "age"),
        ([{**ROW, "ward": "e" * 5000}], "has 5000 letters"),
        ([ROW] * (MOST_ROWS + 1), "at most 1000"),
    ],
)
def test_a_row_that_cannot_be_read_gets_one_sentence(client: TestClient, rows: Any, sentence: str) -> None:
    answer = asked(client, rows)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"rows": [{"age": NaN}]}',
        b'{"rows": [{"age": Infinity}]}',
        b'{"rows": [{"age": 1, "age": 2}]}',
        b'{"rows": [], "level": 2}',
        b"[]",
        b'{"rows": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request_gets_one_sentence(client: TestClient, body: bytes) -> None:
    answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"].endswith(".")


@pytest.mark.parametrize("row", [rb'{"ward": "\ud800"}', rb'{"\uDFFF": 1}'])
def test_half_of_a_character_is_no_json(client: TestClient, row: bytes) -> None:
    """It would end in a traceback with the row's values where a date is read or a file is written."""
    answer = client.post("/predict", content=b'{"rows": [' + row + b"]}", headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("The body is not JSON")


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(client: TestClient) -> None:
    kind = {"Content-Type": "application/json"}
    assert client.post("/predict", content=b" " * (MOST_BYTES + 1), headers=kind).status_code == 413

    def parts() -> Any:  # no length is told beforehand
        for _ in range(20):
            yield b" " * 100_000

    assert client.post("/predict", content=parts(), headers=kind).status_code == 413
    assert (
        client.post("/predict", content=json.dumps({"rows": [ROW]}), headers={"Content-Type": "text/plain"}).status_code
        == 415
    )


def test_pages_of_other_sites_cannot_ask(client: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1:9999", "127.0.0.1", "localhost:8000.evil.example", ""):
        assert client.get("/schema", headers={"Host": host}).status_code == 421
    assert client.get("/schema", headers={"Host": "LOCALHOST:8000"}).status_code == 200
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8001"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert asked(client, [ROW], headers=headers).status_code == 403
    assert asked(client, [ROW], headers={"Origin": "http://127.0.0.1:8000"}).status_code == 200
    assert client.get("/predict").status_code == 405
    assert client.get("/docs").status_code == 404
    assert client.get("/../service.py").status_code == 404


def test_a_token_guards_all_that_says_something_of_the_model(service: Service, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    made = make_app(service, "0.0.0.0", 8000, read_token(tmp_path / "token"))
    client = TestClient(made, base_url="http://scores.example:8000")
    assert [client.get(path).status_code for path in ("/", "/page.js", "/health", "/schema")] == [200, 200, 200, 401]
    assert asked(client, [ROW]).status_code == 401
    assert asked(client, [ROW], headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert asked(client, [ROW], headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    for host in ("[a", "a]", ":", "a/health?", "a#", "b@a", "a:1:2"):
        assert client.get("/schema", headers={"Host": host}).status_code == 421
    (tmp_path / "token").write_text("short")
    with pytest.raises(UserError, match="at least 16 letters"):
        read_token(tmp_path / "token")


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_html(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("page.html", "page.js", "page.css"):
        text = (STATIC / name).read_text()
        assert "://" not in text
        assert not any(
            word in text for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=")
        )


def test_connections_that_send_no_request_are_ended(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpfed.serve.service.PATIENCE", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        running = server(make_app(service, port=port))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        while not running.started:
            thread.join(0.01)
        whole = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        for sent in (b"", b"GET /health HT", whole + b"GET /hea", whole.replace(b"GET", b"POST")[:-2] + b"X: "):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as idle:
                idle.sendall(sent)
                found = b"".join(iter(lambda: idle.recv(10_000), b""))  # until the service ends it
                assert found.count(b"200 OK") == sent.count(b"\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
            head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
            assert b"408" in b"".join(iter(lambda: slow.recv(10_000), b""))
        running.should_exit = True
        thread.join(10)


def test_others_are_not_served_without_a_token(ward: Path, command: Command) -> None:
    assert "needs a token" in command("serve", "run", "--client", "bern", "--host", "0.0.0.0").sentence
    assert "Choose whose model" in command("serve", "run").sentence
    assert "Choose the file" in command("export", "run", "--client", "bern").sentence
