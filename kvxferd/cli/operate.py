"""The verbs that change a running daemon: `reload`, `drain`, `drop-peer`, `cancel` and `disown`."""

from __future__ import annotations

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_WORK_LEFT
from kvxferd.tooling.output import format_count, print_json, print_line


@click.command()
@json_option
@with_control_client
def reload(daemon: ControlClient, as_json: bool) -> None:
    """Have the daemon read its configuration again: allow-lists and the log level.

    SIGHUP does the same. Prints what changed, and what differs but needs a restart. An invalid file is
    refused, and nothing changes. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/reload")
    if as_json:
        print_json(reply)
        return
    print_line("changed: " + (", ".join(reply["changed"]) or "nothing"))
    if reply["ignored"]:
        print_line("ignored until a restart: " + ", ".join(reply["ignored"]))
    for endpoint in reply["dropped_peers"]:
        print_line(f"dropped peer {endpoint}")
    if reply["closes_connections"]:
        print_line("closed peers' connections to this node (admitted peers connect again)")
    if closed := reply["closed_sessions"]:
        print_line(f"closed {format_count(closed, 'session')} of users who are no longer allowed")


@click.command()
@click.option("--wait", is_flag=True, help="Return when the drain is over, and print what it left.")
@json_option
@with_control_client
def drain(daemon: ControlClient, wait: bool, as_json: bool) -> None:
    """Stop the daemon once its transfers have ended, at the latest after drain.limit_s.

    Returns at once, or with --wait when it is over: exit code 0 if nothing was left, 1 if something
    was. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/drain", {"wait": str(wait).lower()}, wait_forever=wait)
    if as_json:
        print_json(reply)
    elif not wait:
        print_line("draining: the daemon takes nothing new, and ends when what runs has ended")
    elif reply["drained"]:
        print_line("drained: nothing was left")
    else:
        transfers, pulls = reply["transfers"], reply["pulls"]
        left = f"{format_count(len(transfers), 'transfer')} and {format_count(len(pulls), 'pull')} left"
        print_line(f"ended with {left}, at the limit or by a second signal:")
        for one in transfers:
            print_line(f"  transfer {one['transfer_id']} of {one['engine_id']}, {one['state']}")
        for one in pulls:
            print_line(f"  pull {one['pull']} of {one['transfer_id']}, {one['phase']}")
    if wait and not reply["drained"]:
        click.get_current_context().exit(EXIT_WORK_LEFT)


@click.command("drop-peer")
@click.argument("endpoint")
@json_option
@with_control_client
def drop_peer(daemon: ControlClient, endpoint: str, as_json: bool) -> None:
    """Forget the daemon at ENDPOINT, as `kvxferd peers` shows it; its #KEY may be omitted.

    Requests that wait for its reply fail and the connection is closed; the next request to it connects
    again. A pull that is being read goes on. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/peers/drop", {"endpoint": endpoint})
    if as_json:
        print_json(reply)
        return
    for dropped in reply["dropped"]:
        print_line(f"dropped {dropped}")


@click.command()
@click.argument("transfer", required=False)
@click.option("--engine", metavar="ID", help="Only this engine's transfer of that name.")
@click.option("--pull", type=int, metavar="N", help="End this pull instead, by its number.")
@json_option
@with_control_client
def cancel(
    daemon: ControlClient, transfer: str | None, engine: str | None, pull: int | None, as_json: bool
) -> None:
    """Release the published TRANSFER, or end pull N; `kvxferd transfers` shows both.

    The pulls of a cancelled transfer fail, and its blocks are released to the engine. A cancelled
    pull ends as failed. Only root and the user that runs the daemon may do this.
    """
    if (transfer is None) == (pull is None):
        raise click.UsageError("give either a TRANSFER or --pull N")
    if pull is not None:
        reply = daemon.post("/v1/pulls/cancel", {"pull": str(pull)})
        line = f"cancelled pull {pull}"
    else:
        assert transfer is not None
        named = {"transfer_id": transfer} | ({"engine_id": engine} if engine else {})
        reply = daemon.post("/v1/transfers/cancel", named)
        line = f"cancelled transfer {transfer} of {', '.join(reply['engines'])}"
    if as_json:
        print_json(reply)
    else:
        print_line(line)


@click.command()
@click.argument("engine_id")
@json_option
@with_control_client
def disown(daemon: ControlClient, engine_id: str, as_json: bool) -> None:
    """Remove the owner of ENGINE_ID: the next user to register it owns it.

    An engine id belongs to a user while ranks of it are registered, and for worker.ownership_s after the
    last has left. So long a rank is kept for the daemon or the user that it was of before this daemon's
    restart; that ends too, as do ranks of nodes that are silent. Only root and the user that runs the
    daemon may.
    """
    reply = daemon.post("/v1/engines/disown", {"engine_id": engine_id})
    if as_json:
        print_json(reply)
        return
    whose = f", which was uid {reply['uid']}'s" if reply["uid"] is not None else ""
    num_ranks = reply["ranks"]
    ranks = f"; {num_ranks} {'rank is' if num_ranks == 1 else 'ranks are'} free" if num_ranks else ""
    print_line(f"disowned {reply['disowned']}{whose}{ranks}")
