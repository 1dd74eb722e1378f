import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** A consumer of shop/orders-view: pull, work and commit in one transaction. */
public class OrdersView {
    record Event(String id, String payload) {}

    private static final Pattern NUMBER = Pattern.compile("\"number\": *(-?\\d+)"); // a JSON library in earnest

    public static void main(String[] arguments) throws SQLException {
        try (Connection connection = DriverManager.getConnection(arguments[0])) {
            connection.setAutoCommit(false);
            while (handleBatch(connection)) {
            }
        }
    }

    /** Effects and progress commit together, or not at all. False: nothing is left. */
    static boolean handleBatch(Connection connection) throws SQLException {
        List<Event> events = pull(connection);
        for (Event event : events) {
            try {
                project(connection, event);
            } catch (IllegalArgumentException | SQLException failure) {
                connection.rollback();
                refuse(connection, event, failure.getMessage());
                connection.commit();
                return true;
            }
        }
        connection.commit();
        return !events.isEmpty();
    }

    static List<Event> pull(Connection connection) throws SQLException {
        List<Event> events = new ArrayList<>();
        try (PreparedStatement pull = connection.prepareStatement(
                     "select event_id::text, payload from mailboat.pull('shop/orders-view', 100)");
             ResultSet rows = pull.executeQuery()) {
            while (rows.next()) {
                events.add(new Event(rows.getString(1), new String(rows.getBytes(2), StandardCharsets.UTF_8)));
            }
        }
        return events;
    }

    static void project(Connection connection, Event event) throws SQLException {
        Matcher number = NUMBER.matcher(event.payload());
        if (!number.find() || Integer.parseInt(number.group(1)) < 0) {
            throw new IllegalArgumentException("no number that can be used");
        }
        try (PreparedStatement insert = connection.prepareStatement(
                "insert into orders_view (event_id, number) values (?::uuid, ?)")) {
            insert.setString(1, event.id());
            insert.setInt(2, Integer.parseInt(number.group(1)));
            insert.executeUpdate();
        }
    }

    static void refuse(Connection connection, Event event, String error) throws SQLException {
        try (PreparedStatement refuse = connection.prepareStatement(
                "select mailboat.refuse('shop/orders-view', ?::uuid, ?)")) {
            refuse.setString(1, event.id());
            refuse.setString(2, error);
            refuse.execute();
        }
    }
}
