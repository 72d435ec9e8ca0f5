//! The events of a trace, and the requests among them.

use serde_json::{Map, Value};

/// The events of an array that has one in each line, without those that are not whole: the file may
/// be copied while it is written, and earlier versions left parts of events.
fn whole_lines(body: &str) -> Vec<Value> {
    let Some(lines) = body.strip_prefix('[') else {
        return Vec::new();
    };
    let is_between = |c: char| c.is_whitespace() || c == ',' || c == ']';
    let event = |line: &str| serde_json::from_str(line.trim_matches(is_between)).ok();
    lines.lines().filter_map(event).filter(Value::is_object).collect()
}

/// When an event was, in microseconds; the names of processes have no time.
pub(super) fn time(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap_or(0.0)
}

/// The events of a file. Files of earlier versions have no end.
pub(super) fn events(text: &str) -> Result<Vec<Value>, String> {
    let body = text.trim_end();
    let whole = match body.strip_suffix(']') {
        Some(_) => body.to_owned(),
        None => format!("{}]", body.strip_suffix(',').unwrap_or(body)),
    };
    serde_json::from_str(&whole).or_else(|error| {
        let events = whole_lines(body);
        match events.is_empty() {
            true => Err(format!("not a trace: {error}")),
            false => Ok(events),
        }
    })
}

/// A request, in nanoseconds.
pub(super) struct Request<'a> {
    pub(super) pid: u64,
    args: &'a Map<String, Value>,
}

impl<'a> Request<'a> {
    pub(super) fn text(&self, key: &str) -> &'a str {
        self.args.get(key).and_then(Value::as_str).unwrap_or("?")
    }

    pub(super) fn number(&self, key: &str) -> u64 {
        self.args.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// Microseconds from one stage to another.
    pub(super) fn micros(&self, from: &str, to: &str) -> f64 {
        self.number(to).saturating_sub(self.number(from)) as f64 / 1000.0
    }
}

/// The beginning of each request is an event that has all of it.
pub(super) fn requests<'a>(events: &'a [Value]) -> impl Iterator<Item = Request<'a>> + use<'a> {
    events.iter().filter_map(|event| {
        let args = event["args"].as_object()?;
        args.contains_key("posted").then(|| Request {
            pid: event["pid"].as_u64().unwrap_or(0),
            args,
        })
    })
}

/// A trace of two requests of one queue pair, of a process that was killed.
#[cfg(test)]
pub(super) const TRACE: &str = r#"[
{"ph":"M","name":"process_name","pid":7,"args":{"name":"program (7)"}},
{"ph":"i","s":"p","name":"Rts","cat":"qp 0x1","pid":7,"tid":0,"ts":1.0},
{"ph":"b","name":"SEND 0x5","cat":"qp 0x1","id":"1-send-0","pid":7,"tid":1,"ts":2.0,"args":{"qp":"0x1","opcode":"SEND","queue":"send","wr_id":"0x5","bytes":64,"status":"SUCCESS","posted":2000,"published":3000,"completed":5000,"polled":9000}},
{"ph":"b","name":"posted","cat":"qp 0x1","id":"1-send-0","pid":7,"tid":1,"ts":2.0},
{"ph":"b","name":"SEND 0x6","cat":"qp 0x1","id":"1-send-1","pid":7,"tid":1,"ts":11.0,"args":{"qp":"0x1","opcode":"SEND","queue":"send","wr_id":"0x6","bytes":64,"status":"RETRY_EXC_ERR","posted":11000,"published":12000,"completed":13000,"polled":14000}},
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_without_an_end_is_a_trace() {
        assert_eq!(events(TRACE).unwrap().len(), 5);
        let ended = format!("{}]", TRACE.trim_end().trim_end_matches(','));
        assert_eq!(events(&ended).unwrap().len(), 5);
        assert!(events("[\n").unwrap().is_empty());
        assert!(events("{").is_err());
    }

    #[test]
    fn an_event_of_which_a_half_was_written_is_left_out() {
        for len in TRACE.find("}},").unwrap() + 3..TRACE.len() {
            let cut = &TRACE[..len];
            let whole = cut.matches("},\n").count();
            assert!(events(cut).unwrap().len() >= whole, "{cut}");
            // Another process has continued the file.
            let continued = format!("{cut}\n{}", TRACE.strip_prefix("[\n").unwrap());
            assert!(events(&continued).unwrap().len() >= whole + 5, "{continued}");
        }
    }
}
