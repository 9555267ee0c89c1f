"""`tidegate log dump`: log files line for line as `kafka-dump-log` prints them, or as JSON lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import Verb, talk_options
from tidegate.cli.output import TerminalText
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.log.dump.decoders import RecordParser

_TEXT = "org.apache.kafka.tools.api.StringDecoder"
_NOT_OFFERED = {
    "cluster_metadata_decoder": "--cluster-metadata-decoder",
    "remote_log_metadata_decoder": "--remote-log-metadata-decoder",
    "share_group_state_decoder": "--share-group-state-decoder",
}


@click.command("dump", cls=Verb)
@click.argument("positional", metavar="[FILES]...", nargs=-1)
@click.option("--files", "listed", metavar="A,B,…", multiple=True, help="The files, separated by commas.")
@click.option("--print-data-log", is_flag=True, help="Print keys and values; implies --deep-iteration.")
@click.option("--deep-iteration", is_flag=True, help="Print records, not only batches.")
@click.option("--index-sanity-check", is_flag=True, help="Only check indexes as a broker does at start.")
@click.option("--verify-index-only", is_flag=True, help="Compare indexes with the log without printing them.")
@click.option("--skip-record-metadata", is_flag=True, help="Print only key and value of records.")
@click.option(
    "--max-message-size",
    type=click.IntRange(min=0),
    default=5 * 1024 * 1024,
    show_default=True,
    metavar="BYTES",
    help="Largest batch an index entry may point at.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=2**31 - 1,
    metavar="BYTES",
    help="Read no more than this much of each log file.",
)
@click.option(
    "--key-decoder-class",
    is_flag=False,
    flag_value=_TEXT,
    metavar="[NAME]",
    help="How to read keys: StringDecoder, IntegerDecoder, LongDecoder, DefaultDecoder (hex).",
)
@click.option(
    "--value-decoder-class", is_flag=False, flag_value=_TEXT, metavar="[NAME]", help="How to read values."
)
@click.option("--offsets-decoder", is_flag=True, help="The files are of __consumer_offsets.")
@click.option("--transaction-log-decoder", is_flag=True, help="The files are of __transaction_state.")
@click.option("--cluster-metadata-decoder", is_flag=True, hidden=True)
@click.option("--remote-log-metadata-decoder", is_flag=True, hidden=True)
@click.option("--share-group-state-decoder", is_flag=True, hidden=True)
@click.option(
    "--format-profile",
    type=click.Choice(["modern", "seed"]),
    default="modern",
    show_default=True,
    help="Wording of Kafka 3.3 and later, or of 2.7 and before.",
)
@click.option(
    "--format",
    "format",
    type=click.Choice(["kafka", "json", "jsonl"]),
    default="kafka",
    show_default=True,
    help="Kafka's text (also in a pipe), or one JSON object per line.",
)
@talk_options
def command(
    positional: tuple[str, ...],
    listed: tuple[str, ...],
    print_data_log: bool,
    deep_iteration: bool,
    index_sanity_check: bool,
    verify_index_only: bool,
    skip_record_metadata: bool,
    max_message_size: int,
    max_bytes: int,
    key_decoder_class: str | None,
    value_decoder_class: str | None,
    offsets_decoder: bool,
    transaction_log_decoder: bool,
    format_profile: str,
    format: str,
    **not_offered: bool,
) -> int:
    """Print .log, .index, .timeindex, .txnindex, .snapshot and .checkpoint files.

    Needs no broker, writes nothing. Findings (gaps, indexes that do not fit) go to stderr and leave the exit
    code at 0, as Kafka's tool does; a file that cannot be read to its end gives 5. `tidegate verify` judges.

    \b
    tidegate log dump data/log/orders-0/00000000000000000000.log
    tidegate log dump --files A.log,A.index --print-data-log
    """
    from tidegate.log.dump.dump import DumpOptions, Target, dump
    from tidegate.log.dump.json import JsonSink
    from tidegate.log.dump.text import TextSink

    targets = [Target.of(name) for name in _names(listed, positional)]
    if not targets:
        raise click.UsageError("no files: name them, or give --files A,B")
    options = DumpOptions(
        print_data=print_data_log or key_decoder_class is not None or value_decoder_class is not None,
        deep=deep_iteration,
        index_sanity_check=index_sanity_check,
        verify_index_only=verify_index_only,
        skip_record_metadata=skip_record_metadata,
        max_message_bytes=max_message_size,
        max_bytes=max_bytes,
        profile=format_profile,
        parser=_parser(
            key_decoder_class, value_decoder_class, offsets_decoder, transaction_log_decoder, not_offered
        ),
    )
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=False)
    out: Any = TerminalText(sys.stdout) if sys.stdout.isatty() else sys.stdout
    sink = TextSink(options, out, sys.stderr) if format == "kafka" else JsonSink(options, out)
    return 5 if dump(targets, options, sink) else 0


def _names(listed: tuple[str, ...], positional: tuple[str, ...]) -> list[str]:
    return [name for group in listed for name in group.split(",") if name] + list(positional)


def _parser(
    key: str | None, value: str | None, offsets: bool, transactions: bool, not_offered: dict[str, bool]
) -> RecordParser | None:
    from tidegate.log.dump import decoders as dump_decoders

    for name, asked in not_offered.items():
        if asked:
            raise InvalidError(
                f"{_NOT_OFFERED[name]} is not offered; dump the raw values with --print-data-log, "
                f"or with --value-decoder-class DefaultDecoder as hex"
            )
    if offsets:
        return dump_decoders.parse_offsets_record
    if transactions:
        return dump_decoders.parse_transaction_record
    return dump_decoders.parse_with(
        dump_decoders.find_decoder(key or _TEXT), dump_decoders.find_decoder(value or _TEXT)
    )
