import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeSet;
import java.util.function.Consumer;
import java.util.stream.Stream;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.IntegerSerializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.Serializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.common.utils.AppInfoParser;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.TestInputTopic;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.TopologyTestDriver;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.EmitStrategy;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindowedDeserializer;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.SlidingWindows;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TimeWindowedDeserializer;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.kstream.WindowedSerdes;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlySessionStore;
import org.apache.kafka.streams.state.SessionStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.ValueAndTimestamp;
import org.apache.kafka.streams.state.WindowStore;
import org.apache.kafka.streams.state.WindowStoreIterator;
import org.apache.kafka.streams.test.TestRecord;

/**
 * The real Kafka Streams, asked what it does.
 *
 * record FOLDER: runs every topology through the test driver and writes one file of JSON lines each: what it
 * is, its input, every record it produced, what its store then answers, how many records it dropped.
 * decode: reads lines "FORMAT SIZE HEX" and writes "HEX_INNER START END", or "null", or "error TEXT".
 * partition: reads lines "PARTITIONS HEX" and writes "MURMUR2 PARTITION".
 * restore SERVERS APP STORE INPUT FOLDER GAP RETENTION: restores a session store of counts from its changelog topic, reads
 * lines of keys and writes each key's sessions, "KEY START END COUNT".
 */
public class StreamsOracle {
    static final String APP = "oracle";
    static final String STORE = "store";
    static final HexFormat HEX = HexFormat.of();
    static final ObjectMapper JSON = new ObjectMapper();

    record Input(Object key, String value, long timestamp) {}

    record Case(String name, Map<String, Object> about, String kind, Topology topology, List<Input> inputs) {}

    public static void main(String[] arguments) throws Exception {
        switch (arguments[0]) {
            case "record" -> {
                Path folder = Path.of(arguments[1]);
                Files.createDirectories(folder);
                for (Case one : cases()) {
                    record(one, folder.resolve(one.name() + ".jsonl"));
                }
            }
            case "decode" -> answer(StreamsOracle::decode);
            case "partition" -> answer(StreamsOracle::partition);
            case "restore" -> restore(arguments);
            default -> throw new IllegalArgumentException("record, decode, partition or restore, not " + arguments[0]);
        }
    }

    // -- topologies ------------------------------------------------------------------------------------

    static List<Case> cases() {
        long now = 1_700_000_040_000L;
        List<Case> all = new ArrayList<>();
        all.add(time("tumbling-count", TimeWindows.ofSizeAndGrace(ms(60_000), ms(30_000)), keyed(
            "user-1", now, "user-2", now + 5_000, "user-1", now + 59_999, "user-1", now + 60_000,
            "", now + 61_000, "user-2", now + 30_000, "user-1", now + 89_999, "user-1", now + 1,
            "user-3", now + 90_000, "user-1", now + 2, "user-1", now + 600_000, "user-2", now + 60_001)));
        all.add(time("tumbling-late", TimeWindows.ofSizeAndGrace(ms(10), ms(90)),
            one(200, 100, 101, 102, 103, 104, 105, 6)));
        all.add(time("tumbling-small", TimeWindows.ofSizeAndGrace(ms(2), ms(1)), one(0, 1, 2, 1, 0, 5, 0)));
        all.add(time("hopping-count", TimeWindows.ofSizeAndGrace(ms(10), ms(90)).advanceBy(ms(5)),
            one(100, 0, 1, 2, 3, 4, 5, 6, 105, 106)));
        all.add(time("hopping-keys", TimeWindows.ofSizeAndGrace(ms(12), ms(4)).advanceBy(ms(5)), keyed(
            "a", 21L, "b", 3L, "a", 20L, "a", 29L, "b", 30L, "a", 17L, "aa", 33L, "b", 26L)));
        all.add(integers());
        all.add(sliding("sliding-count", SlidingWindows.ofTimeDifferenceAndGrace(ms(10), ms(5)),
            one(10, 10, 14, 15, 20, 22, 30)));
        all.add(sliding("sliding-early", SlidingWindows.ofTimeDifferenceAndGrace(ms(50), ms(0)),
            one(0, 5, 6, 3, 13, 10, 70)));
        all.add(session("session-count", SessionWindows.ofInactivityGapAndGrace(ms(5_000), ms(10_000)), keyed(
            "user-1", now, "user-2", now + 1, "user-1", now + 5_000, "user-1", now + 10_001,
            "user-2", now + 20_000, "user-1", now + 12_000, "user-3", now + 40_000, "user-2", now + 1)));
        all.add(session("session-merge", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(100)),
            one(0, 11, 5)));
        all.add(session("session-extend", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(0)), one(0, 5)));
        all.add(session("session-same-time", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(0)), one(7, 7)));
        all.add(session("session-no-grace", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(0)), keyed(
            "k", 11L, "j", 0L)));
        all.add(session("session-grace-open", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(1)), keyed(
            "k", 11L, "j", 0L)));
        all.add(session("session-grace-shut", SessionWindows.ofInactivityGapAndGrace(ms(10), ms(1)), keyed(
            "k", 12L, "j", 0L)));
        all.add(reduced());
        all.add(papi("papi-window", 120_000, 3, false, values(
            "k", "one", 120_000L, "k", "two", 150_000L, "k", "three", 180_000L, "j", "four", 180_000L,
            "k", "five", 240_000L, "k", null, 240_000L, "k", "six", 270_000L)));
        all.add(papi("papi-duplicates", 120_000, 3, true, values(
            "k", "one", 0L, "k", "one-2", 0L, "k", null, 0L, "k", "two", 30L, "k", "two-2", 30L)));
        all.add(papi("papi-late", 1_000, 1_000, false, values("b", "jump", 61_000L, "a", "late", 10L)));
        all.add(onClose("close-tumbling", "time", builder -> counted(builder)
            .windowedBy(TimeWindows.ofSizeAndGrace(ms(10), ms(5)).advanceBy(ms(5)))
            .emitStrategy(EmitStrategy.onWindowClose()).count(timeStore())
            .toStream().to("out", Produced.with(timeSerde(10), Serdes.Long())),
            Map.of("window", "hopping", "size", 10, "advance", 5, "grace", 5),
            one(1, 3, 8, 12, 16, 7, 21, 40)));
        all.add(onClose("close-sliding", "time", builder -> counted(builder)
            .windowedBy(SlidingWindows.ofTimeDifferenceAndGrace(ms(10), ms(5)))
            .emitStrategy(EmitStrategy.onWindowClose()).count(timeStore())
            .toStream().to("out", Produced.with(timeSerde(10), Serdes.Long())),
            Map.of("window", "sliding", "difference", 10, "grace", 5),
            one(10, 10, 14, 15, 20, 22, 30)));
        all.add(onClose("close-session", "session", builder -> counted(builder)
            .windowedBy(SessionWindows.ofInactivityGapAndGrace(ms(10), ms(5)))
            .emitStrategy(EmitStrategy.onWindowClose()).count(sessionStore())
            .toStream().to("out", Produced.with(sessionSerde(), Serdes.Long())),
            Map.of("window", "session", "gap", 10, "grace", 5), one(0, 5, 30, 33, 60, 100)));
        all.add(suppressed());
        return all;
    }

    static Case time(String name, TimeWindows windows, List<Input> inputs) {
        StreamsBuilder builder = new StreamsBuilder();
        counted(builder).windowedBy(windows).count(timeStore())
            .toStream().to("out", Produced.with(timeSerde(windows.sizeMs), Serdes.Long()));
        Map<String, Object> about = about(windows.advanceMs == windows.sizeMs ? "tumbling" : "hopping",
            "size", windows.sizeMs, "advance", windows.advanceMs, "grace", windows.gracePeriodMs());
        return new Case(name, about, "time", builder.build(), inputs);
    }

    static Case sliding(String name, SlidingWindows windows, List<Input> inputs) {
        StreamsBuilder builder = new StreamsBuilder();
        counted(builder).windowedBy(windows).count(timeStore())
            .toStream().to("out", Produced.with(timeSerde(windows.timeDifferenceMs()), Serdes.Long()));
        Map<String, Object> about =
            about("sliding", "difference", windows.timeDifferenceMs(), "grace", windows.gracePeriodMs());
        return new Case(name, about, "time", builder.build(), inputs);
    }

    static Case session(String name, SessionWindows windows, List<Input> inputs) {
        StreamsBuilder builder = new StreamsBuilder();
        counted(builder).windowedBy(windows).count(sessionStore())
            .toStream().to("out", Produced.with(sessionSerde(), Serdes.Long()));
        Map<String, Object> about =
            about("session", "gap", windows.inactivityGap(), "grace", windows.gracePeriodMs());
        return new Case(name, about, "session", builder.build(), inputs);
    }

    /** Keys of a fixed width, and the first window that does not start at a round number of anything. */
    static Case integers() {
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream("in", Consumed.with(Serdes.Integer(), Serdes.String())).groupByKey()
            .windowedBy(TimeWindows.ofSizeAndGrace(ms(7), ms(0)))
            .count(Materialized.<Integer, Long, WindowStore<Bytes, byte[]>>as(STORE)
                .withKeySerde(Serdes.Integer()).withValueSerde(Serdes.Long()));
        List<Input> inputs = List.of(new Input(1, "v", 60_000), new Input(-1, "v", 60_001),
            new Input(1, "v", 60_002), new Input(Integer.MAX_VALUE, "v", 60_003));
        return new Case("tumbling-integer-keys", about("tumbling", "size", 7L, "advance", 7L, "grace", 0L), "time",
            builder.build(), inputs);
    }

    /** A reducer that answers null deletes its window: a tombstone. */
    static Case reduced() {
        StreamsBuilder builder = new StreamsBuilder();
        counted(builder).windowedBy(TimeWindows.ofSizeAndGrace(ms(10), ms(0)))
            .reduce((one, two) -> two.equals("forget") ? null : one + "+" + two,
                Materialized.<String, String, WindowStore<Bytes, byte[]>>as(STORE)
                    .withKeySerde(Serdes.String()).withValueSerde(Serdes.String()))
            .toStream().to("out", Produced.with(timeSerde(10), Serdes.String()));
        return new Case("reduce-tombstone", about("tumbling", "size", 10L, "advance", 10L, "grace", 0L), "time",
            builder.build(),
            values("k", "a", 1L, "k", "b", 2L, "j", "c", 3L, "k", "forget", 4L, "k", "d", 5L, "j", "forget", 6L));
    }

    /** A processor that puts each record into a window store at its own timestamp. */
    static Case papi(String name, long retention, long size, boolean duplicates, List<Input> inputs) {
        StoreBuilder<WindowStore<String, String>> store = Stores.windowStoreBuilder(
            Stores.persistentWindowStore(STORE, ms(retention), ms(size), duplicates),
            Serdes.String(), Serdes.String());
        Topology topology = new Topology()
            .addSource("source", Serdes.String().deserializer(), Serdes.String().deserializer(), "in")
            .addProcessor("putter", Putter::new, "source")
            .addStateStore(store, "putter");
        Map<String, Object> about = about("plain", "size", size, "retention", retention);
        about.put("retain_duplicates", duplicates);
        return new Case(name, about, "plain", topology, inputs);
    }

    static class Putter implements Processor<String, String, Void, Void> {
        private WindowStore<String, String> store;

        @Override
        public void init(ProcessorContext<Void, Void> context) {
            store = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, String> record) {
            store.put(record.key(), record.value(), record.timestamp());
        }
    }

    static Case onClose(String name, String kind, Consumer<StreamsBuilder> shape, Map<String, Object> about,
            List<Input> inputs) {
        StreamsBuilder builder = new StreamsBuilder();
        shape.accept(builder);
        Map<String, Object> more = new LinkedHashMap<>(new java.util.TreeMap<>(about));
        more.put("emit", "close");
        return new Case(name, more, kind, builder.build(), inputs);
    }

    static Case suppressed() {
        StreamsBuilder builder = new StreamsBuilder();
        KTable<Windowed<String>, Long> counts = counted(builder)
            .windowedBy(TimeWindows.ofSizeAndGrace(ms(2), ms(1))).count(timeStore());
        counts.toStream().to("raw", Produced.with(timeSerde(2), Serdes.Long()));
        counts.suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()).withName("held"))
            .toStream().to("out", Produced.with(timeSerde(2), Serdes.Long()));
        return new Case("suppress", about("tumbling", "size", 2L, "advance", 2L, "grace", 1L), "time",
            builder.build(), one(0, 1, 2, 1, 0, 5, 0));
    }

    static KGroupedStream<String, String> counted(StreamsBuilder builder) {
        return builder.stream("in", Consumed.with(Serdes.String(), Serdes.String())).groupByKey();
    }

    static Materialized<String, Long, WindowStore<Bytes, byte[]>> timeStore() {
        return Materialized.<String, Long, WindowStore<Bytes, byte[]>>as(STORE)
            .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long());
    }

    static Materialized<String, Long, SessionStore<Bytes, byte[]>> sessionStore() {
        return Materialized.<String, Long, SessionStore<Bytes, byte[]>>as(STORE)
            .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long());
    }

    static Serde<Windowed<String>> timeSerde(long size) {
        return WindowedSerdes.timeWindowedSerdeFrom(String.class, size);
    }

    static Serde<Windowed<String>> sessionSerde() {
        return WindowedSerdes.sessionWindowedSerdeFrom(String.class);
    }

    static Duration ms(long milliseconds) {
        return Duration.ofMillis(milliseconds);
    }

    static List<Input> one(long... timestamps) {
        List<Input> inputs = new ArrayList<>();
        for (long timestamp : timestamps) {
            inputs.add(new Input("key", "v", timestamp));
        }
        return inputs;
    }

    static List<Input> keyed(Object... pairs) {
        List<Input> inputs = new ArrayList<>();
        for (int at = 0; at < pairs.length; at += 2) {
            inputs.add(new Input(pairs[at], "v", (Long) pairs[at + 1]));
        }
        return inputs;
    }

    static List<Input> values(Object... triples) {
        List<Input> inputs = new ArrayList<>();
        for (int at = 0; at < triples.length; at += 3) {
            inputs.add(new Input(triples[at], (String) triples[at + 1], (Long) triples[at + 2]));
        }
        return inputs;
    }

    static Map<String, Object> about(String window, Object... pairs) {
        Map<String, Object> about = new LinkedHashMap<>();
        about.put("window", window);
        for (int at = 0; at < pairs.length; at += 2) {
            about.put((String) pairs[at], pairs[at + 1]);
        }
        return about;
    }

    // -- recording -------------------------------------------------------------------------------------

    static void record(Case one, Path file) throws IOException {
        Path state = Files.createTempDirectory("streams-oracle");
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, APP);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, "none:1");
        settings.put(StreamsConfig.STATE_DIR_CONFIG, state.toString());
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        // Otherwise windows that close within one second of wall clock wait for each other.
        settings.put(StreamsConfig.InternalConfig.EMIT_INTERVAL_MS_KSTREAMS_WINDOWED_AGGREGATION, 0L);
        List<Map<String, Object>> lines = new ArrayList<>();
        Map<String, Object> head = line("about");
        head.put("name", one.name());
        head.put("kafka", AppInfoParser.getVersion());
        head.put("application", APP);
        head.put("store", STORE);
        head.put("store_kind", one.kind());
        head.putAll(one.about());
        lines.add(head);
        try (TopologyTestDriver driver = new TopologyTestDriver(one.topology(), settings, Instant.EPOCH)) {
            for (Input input : one.inputs()) {
                lines.add(pipe(driver, input));
            }
            for (String topic : new TreeSet<>(driver.producedTopicNames())) {
                lines.addAll(produced(driver, topic));
            }
            lines.addAll(switch (one.kind()) {
                case "session" -> sessions(driver);
                case "plain" -> windows(driver.<Object, Object>getWindowStore(STORE), one);
                default -> windows(driver.<Object, ValueAndTimestamp<Object>>getTimestampedWindowStore(STORE), one);
            });
            Map<String, Object> dropped = line("dropped");
            dropped.put("records", driver.metrics().entrySet().stream()
                .filter(metric -> metric.getKey().name().equals("dropped-records-total"))
                .mapToDouble(metric -> (Double) metric.getValue().metricValue()).sum());
            lines.add(dropped);
            lines.add(segments(state));
        } finally {
            try (Stream<Path> paths = Files.walk(state)) {
                paths.sorted(Comparator.reverseOrder()).forEach(path -> path.toFile().delete());
            }
        }
        List<String> text = new ArrayList<>();
        for (Map<String, Object> row : lines) {
            text.add(JSON.writeValueAsString(row));
        }
        Files.write(file, text);
    }

    static Map<String, Object> pipe(TopologyTestDriver driver, Input input) {
        if (input.key() instanceof Integer key) {
            TestInputTopic<Integer, String> topic =
                driver.createInputTopic("in", new IntegerSerializer(), new StringSerializer());
            topic.pipeInput(key, input.value(), input.timestamp());
        } else {
            TestInputTopic<String, String> topic =
                driver.createInputTopic("in", new StringSerializer(), new StringSerializer());
            topic.pipeInput((String) input.key(), input.value(), input.timestamp());
        }
        Map<String, Object> row = line("input");
        row.put("key", HEX.formatHex(bytesOf(input.key())));
        row.put("value", input.value() == null ? null : HEX.formatHex(bytesOf(input.value())));
        row.put("timestamp", input.timestamp());
        return row;
    }

    static List<Map<String, Object>> produced(TopologyTestDriver driver, String topic) {
        List<Map<String, Object>> rows = new ArrayList<>();
        var output = driver.createOutputTopic(topic, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        for (TestRecord<byte[], byte[]> record : output.readRecordsToList()) {
            Map<String, Object> row = line("record");
            row.put("topic", topic);
            row.put("index", rows.size());
            row.put("key", hex(record.key()));
            row.put("value", hex(record.value()));
            row.put("timestamp", record.timestamp());
            List<List<String>> headers = new ArrayList<>();
            for (Header header : record.headers()) {
                headers.add(List.of(header.key(), HEX.formatHex(header.value())));
            }
            row.put("headers", headers);
            rows.add(row);
        }
        return rows;
    }

    static <V> List<Map<String, Object>> windows(WindowStore<Object, V> store, Case one) {
        List<Map<String, Object>> rows = new ArrayList<>();
        read(rows, "all", store.all());
        read(rows, "backward_all", store.backwardAll());
        for (Object key : one.inputs().stream().map(Input::key).distinct().toList()) {
            try (WindowStoreIterator<V> found = store.fetch(key, 0, Long.MAX_VALUE)) {
                while (found.hasNext()) {
                    KeyValue<Long, V> pair = found.next();
                    rows.add(stored("fetch", key, pair.key, null, pair.value));
                }
            }
        }
        return rows;
    }

    static List<Map<String, Object>> sessions(TopologyTestDriver driver) {
        List<Map<String, Object>> rows = new ArrayList<>();
        SessionStore<Object, Object> store = driver.getSessionStore(STORE);
        read(rows, "all", store.fetch(null, null));
        read(rows, "backward_all", store.backwardFetch(null, null));
        return rows;
    }

    static <V> void read(List<Map<String, Object>> rows, String read, KeyValueIterator<Windowed<Object>, V> found) {
        try (found) {
            while (found.hasNext()) {
                KeyValue<Windowed<Object>, V> pair = found.next();
                rows.add(stored(read, pair.key.key(), pair.key.window().start(), pair.key.window().end(), pair.value));
            }
        }
    }

    static Map<String, Object> stored(String read, Object key, long start, Long end, Object value) {
        Map<String, Object> row = line("stored");
        row.put("read", read);
        row.put("key", HEX.formatHex(bytesOf(key)));
        row.put("start", start);
        row.put("end", end);
        if (value instanceof ValueAndTimestamp<?> stamped) {
            row.put("value", HEX.formatHex(bytesOf(stamped.value())));
            row.put("timestamp", stamped.timestamp());
        } else {
            row.put("value", HEX.formatHex(bytesOf(value)));
        }
        return row;
    }

    /** The time segments that lie on disk, as their folders are called. */
    static Map<String, Object> segments(Path state) throws IOException {
        TreeSet<String> names = new TreeSet<>();
        try (Stream<Path> paths = Files.walk(state)) {
            paths.filter(path -> path.getFileName().toString().matches(STORE + "\\.\\d+"))
                .forEach(path -> names.add(path.getFileName().toString()));
        }
        Map<String, Object> row = line("segments");
        row.put("names", names);
        return row;
    }

    @SuppressWarnings("unchecked")
    static byte[] bytesOf(Object value) {
        Serde<Object> serde = (Serde<Object>) Serdes.serdeFrom(value.getClass());
        try (Serializer<Object> serializer = serde.serializer()) {
            return serializer.serialize("", value);
        }
    }

    static String hex(byte[] bytes) {
        return bytes == null ? null : HEX.formatHex(bytes);
    }

    static Map<String, Object> line(String kind) {
        Map<String, Object> row = new LinkedHashMap<>();
        row.put("line", kind);
        return row;
    }

    // -- questions -------------------------------------------------------------------------------------

    interface Question {
        String ask(String[] words);
    }

    static void answer(Question question) throws IOException {
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder out = new StringBuilder();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.append(question.ask(line.split(" ", -1))).append('\n');
        }
        System.out.print(out);
    }

    static String decode(String[] words) {
        byte[] key = HEX.parseHex(words[2]);
        try {
            Windowed<byte[]> found = decoder(words[0], Long.parseLong(words[1])).deserialize("t", key);
            if (found == null) {
                return "null";
            }
            return HEX.formatHex(found.key()) + " " + found.window().start() + " " + found.window().end();
        } catch (RuntimeException error) {
            return "error " + error.getClass().getSimpleName();
        }
    }

    static Deserializer<Windowed<byte[]>> decoder(String format, long size) {
        if (format.equals("session")) {
            return new SessionWindowedDeserializer<>(new ByteArrayDeserializer());
        }
        var decoder = new TimeWindowedDeserializer<>(new ByteArrayDeserializer(), size);
        decoder.setIsChangelogTopic(format.equals("changelog"));
        return decoder;
    }

    static void restore(String[] words) throws Exception {
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(words[4], Consumed.with(Serdes.String(), Serdes.String()))
            .groupByKey()
            .windowedBy(SessionWindows.ofInactivityGapWithNoGrace(Duration.ofMillis(Long.parseLong(words[6]))))
            .count(Materialized.<String, Long, SessionStore<Bytes, byte[]>>as(words[3])
                .withKeySerde(Serdes.String())
                .withRetention(Duration.ofMillis(Long.parseLong(words[7]))));
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, words[2]);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, words[1]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, words[5]);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class.getName());
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
            streams.start();
            for (int turn = 0; streams.state() != KafkaStreams.State.RUNNING; turn++) {
                if (turn > 1200 || streams.state() == KafkaStreams.State.ERROR) {
                    throw new IllegalStateException("it did not come to run: " + streams.state());
                }
                Thread.sleep(100);
            }
            ReadOnlySessionStore<String, Long> store = streams.store(
                StoreQueryParameters.fromNameAndType(words[3], QueryableStoreTypes.sessionStore()));
            var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
            for (String key = in.readLine(); key != null; key = in.readLine()) {
                try (KeyValueIterator<Windowed<String>, Long> found = store.fetch(key)) {
                    while (found.hasNext()) {
                        KeyValue<Windowed<String>, Long> one = found.next();
                        System.out.println(key + " " + one.key.window().start() + " " + one.key.window().end()
                            + " " + one.value);
                    }
                }
            }
        }
    }

    static String partition(String[] words) {
        byte[] key = HEX.parseHex(words[1]);
        int partitions = Integer.parseInt(words[0]);
        return Utils.murmur2(key) + " " + BuiltInPartitioner.partitionForKey(key, partitions);
    }
}
