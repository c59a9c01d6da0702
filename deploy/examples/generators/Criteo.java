// The generator of ../criteo in Java: a line of Kaggle's display advertising format to a line of MultiSlot text.
// Build: javac -d . Criteo.java
import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.math.BigDecimal;
import java.math.MathContext;
import java.math.RoundingMode;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;

public final class Criteo {
    private static final int NUM_INTEGERS = 13, NUM_CATEGORIES = 26;

    /** An integer as a dense value and as a feature id; both are kept, as few integers are many of the fields. */
    private record Whole(String dense, long step) {}

    private final Map<String, Whole> known = new HashMap<>(Map.of("", new Whole("0.0", 0)));

    /**
     * A number as the job reads it: the shortest digits of its nearest float32, which Python writes, too. Before Java 19
     * Double.toString may write more.
     */
    static String number(double value) {
        double rounded = (float) value;
        for (int digits = 1; ; digits++) {
            MathContext context = new MathContext(digits, RoundingMode.HALF_EVEN);
            String text = new BigDecimal(rounded).round(context).toPlainString();
            if (Double.parseDouble(text) == rounded) {
                return text.contains(".") ? text : text + ".0";
            }
        }
    }

    private Whole wholeOf(String text) {
        Whole found = known.get(text);
        if (found == null) {
            long value = Long.parseLong(text);
            double log = Math.log(value);
            long step = value < 3 ? value + 4 : (long) (log * log) + 7;
            found = new Whole(number(Math.log1p(Math.max(value, 0))), Math.max(1, step));
            known.put(text, found);
        }
        return found;
    }

    /** The sample of an event: each slot in the order of the job file, as its length and its values. */
    private String sample(String event) {
        String[] fields = event.split("\t", -1);
        if (fields.length != 1 + NUM_INTEGERS + NUM_CATEGORIES) {
            int wanted = 1 + NUM_INTEGERS + NUM_CATEGORIES;
            throw new IllegalArgumentException(fields.length + " fields instead of " + wanted);
        }
        double label = Double.parseDouble(fields[0]);
        StringBuilder line = new StringBuilder(512).append(NUM_INTEGERS), steps = new StringBuilder(128);
        for (int number = 1; number <= NUM_INTEGERS; number++) {
            Whole whole = wholeOf(fields[number]);
            line.append(' ').append(whole.dense());
            steps.append(" 1 ").append(whole.step());
        }
        for (int number = 1 + NUM_INTEGERS; number < fields.length; number++) {
            if (fields[number].isEmpty()) {
                line.append(" 0");
            } else {
                line.append(" 1 ").append(Long.toUnsignedString(Long.parseUnsignedLong(fields[number], 16)));
            }
        }
        return line.append(steps).append(" 1 ").append(label == 0 ? "0.0" : number(label)).toString();
    }

    public static void main(String[] arguments) throws IOException {
        Criteo criteo = new Criteo();
        BufferedReader events = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8), 1 << 20);
        try (BufferedWriter samples =
                new BufferedWriter(new OutputStreamWriter(System.out, StandardCharsets.UTF_8), 1 << 20)) {
            for (String event = events.readLine(); event != null; event = events.readLine()) {
                try {
                    samples.write(criteo.sample(event));
                } catch (IllegalArgumentException error) { // the event is rejected, with this reason
                    samples.write("! " + error.getMessage());
                }
                samples.write('\n');
            }
        }
    }
}
