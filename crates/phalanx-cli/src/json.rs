//! `--log-format json`: one object a line, for programs that read logs.

use std::time::{SystemTime, UNIX_EPOCH};

use phalanx::launch::{ElasticHosts, Event, Exit, Failure, NodeFailure, Outcome, Report, Stream};
use serde_json::{Value, json};

/// The stream that `event` goes to, and its line.
pub(crate) fn event(event: &Event<'_>) -> Option<(Stream, Vec<u8>)> {
    let (name, fields) = match *event {
        Event::Line { rank, stream, text } => {
            let name = match stream {
                Stream::Stdout => "stdout",
                Stream::Stderr => "stderr",
            };
            let text = String::from_utf8_lossy(text);
            let line = object("line", json!({ "rank": rank.get(), "stream": name, "text": text }));
            return Some((stream, line));
        }
        Event::Logging { host, folder } => {
            ("logging", json!({ "host": host, "folder": folder.to_string_lossy() }))
        }
        Event::Starting { restarts, max_restarts, world_size, node, nodes } => {
            let world = world_size.get();
            let fields = json!({ "restarts": restarts, "max_restarts": max_restarts, "world_size": world,
                                 "node": node, "nodes": nodes });
            ("starting", fields)
        }
        Event::Started { rank, local_rank, pid } => {
            ("started", json!({ "rank": rank.get(), "local_rank": local_rank, "pid": pid }))
        }
        Event::Exited { rank, pid, exit } => {
            ("exited", with(exit_fields(exit), json!({ "rank": rank.get(), "pid": pid })))
        }
        Event::Lost { failure, replaced_in, replacements, max_replacements } => {
            let max_replacements = Some(max_replacements).filter(|most| *most != ElasticHosts::NO_LIMIT);
            let fields = json!({ "failure": failure_fields(failure),
                                 "replaced_in": replaced_in.map(|wait| wait.as_secs_f64()),
                                 "replacements": replacements, "max_replacements": max_replacements });
            ("lost", fields)
        }
        Event::Ending { signal } => ("ending", json!({ "signal": signal.to_string() })),
        Event::Killing => ("killing", json!({})),
        Event::Restarting { failure } => ("restarting", json!({ "failure": failure_fields(failure) })),
        Event::Gathering { nodes, min_nodes, max_nodes } => {
            ("gathering", json!({ "nodes": nodes, "min_nodes": min_nodes, "max_nodes": max_nodes }))
        }
        Event::Regrouping { left } => ("regrouping", json!({ "left": left.map(node_fields) })),
        Event::Lingering => ("lingering", json!({})),
        Event::Warning { text } => ("warning", json!({ "text": text })),
        _ => return None,
    };
    Some((Stream::Stderr, object(name, fields)))
}

/// The last line.
pub(crate) fn ended(report: &Report, code: i32) -> Vec<u8> {
    let (outcome, failure) = match &report.outcome {
        Outcome::Succeeded => ("succeeded", Value::Null),
        Outcome::Failed(failure) => ("failed", failure_fields(failure)),
        Outcome::NodeFailed(failure) => ("node_failed", node_fields(failure)),
        Outcome::Interrupted(_) => ("interrupted", Value::Null),
        _ => ("stopped", Value::Null),
    };
    let fields = json!({ "outcome": outcome, "exit_code": code, "restarts": report.restarts,
                         "replacements": report.replacements, "seconds": report.elapsed.as_secs_f64(), "failure": failure });
    object("ended", fields)
}

/// The last line of a job that could not be started or watched.
pub(crate) fn not_run(message: &str, code: i32) -> Vec<u8> {
    object(
        "ended",
        json!({ "outcome": "error", "exit_code": code, "message": message, "failure": Value::Null }),
    )
}

fn failure_fields(failure: &Failure) -> Value {
    let stderr: Vec<_> = failure.stderr.iter().map(|line| String::from_utf8_lossy(line)).collect();
    let fields = json!({ "rank": failure.rank.get(), "host": failure.host, "node": failure.node,
                         "pid": failure.pid, "seconds": failure.after.as_secs_f64(),
                         "message": failure.message, "stderr": stderr });
    with(exit_fields(failure.exit), fields)
}

fn node_fields(failure: &NodeFailure) -> Value {
    json!({ "node": failure.node, "host": failure.host, "why": failure.why })
}

fn exit_fields(exit: Exit) -> Value {
    let signal = match exit {
        Exit::Signal(signal) | Exit::Frozen(signal) => Some(signal.to_string()),
        _ => None,
    };
    json!({ "exit_code": exit.code(), "signal": signal })
}

fn object(event: &str, fields: Value) -> Vec<u8> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let mut line = with(json!({ "time": time, "event": event }), fields).to_string().into_bytes();
    line.push(b'\n');
    line
}

fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

#[cfg(test)]
mod tests {
    use phalanx::Rank;

    use super::*;

    #[test]
    fn a_line_is_an_object_on_its_own_stream() {
        let line = Event::Line { rank: Rank::new(3), stream: Stream::Stdout, text: b"a \"b\" \xff" };
        let (stream, bytes) = event(&line).unwrap();
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((stream, bytes.last()), (Stream::Stdout, Some(&b'\n')));
        assert_eq!(
            (&value["rank"], &value["stream"], &value["event"]),
            (&json!(3), &json!("stdout"), &json!("line"))
        );
        assert_eq!(value["text"], "a \"b\" \u{fffd}");
    }

    #[test]
    fn a_job_that_does_not_start_ends_with_an_object_too() {
        let value: Value = serde_json::from_slice(&not_run("no \"train\"\n", 127)).unwrap();
        assert_eq!((&value["event"], &value["outcome"]), (&json!("ended"), &json!("error")));
        assert_eq!((&value["exit_code"], &value["message"]), (&json!(127), &json!("no \"train\"\n")));
    }
}
