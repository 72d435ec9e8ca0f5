//! A trace as a picture (SVG): a lane for each queue and direction, a bar for each request with its
//! stages.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::events::{requests, time};

const LEFT: f64 = 215.0;
const WIDTH: f64 = 1000.0;
const LANE: f64 = 30.0;
const TOP: f64 = 46.0;
/// Colors.
const POSTED: &str = "#9aa5b1";
const DEVICE: &str = "#2f6fb3";
const COMPLETED: &str = "#e0a030";
const WIRE: &str = "#3d9a5f";
/// Most bars: a reader sees no more.
const MOST: usize = 2000;

/// A bar: its lane, its color, begin and end in microseconds, and its label.
struct Bar {
    lane: String,
    color: &'static str,
    from: f64,
    to: f64,
    text: String,
}

/// The part of a trace from `from` on, in microseconds from the first post to a send queue.
pub(super) fn picture(events: &[Value], from: f64, span: f64) -> String {
    let posts = |queue| {
        let requests = requests(events).filter(move |request| request.text("queue") == queue);
        requests.map(|request| request.number("posted")).min()
    };
    let first = posts("send").or_else(|| posts("receive"));
    let begin = first.unwrap_or(0) as f64 / 1000.0 + from;
    let bars = bars(events, begin, span);
    let mut lanes: BTreeMap<&str, usize> = bars.iter().map(|bar| (bar.lane.as_str(), 0)).collect();
    for (number, place) in lanes.values_mut().enumerate() {
        *place = number;
    }
    let height = TOP + LANE * lanes.len().max(1) as f64 + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        LEFT + WIDTH + 40.0
    );
    let legend = [
        ("posted", POSTED),
        ("device", DEVICE),
        ("completed", COMPLETED),
        ("on the wire", WIRE),
    ];
    for (n, (name, color)) in legend.iter().enumerate() {
        let x = LEFT + 110.0 * n as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"6\" width=\"10\" height=\"10\" fill=\"{color}\"/><text x=\"{}\" y=\"15\">{name}</text>",
            x + 14.0
        );
    }
    let x = |at: f64| LEFT + (at - begin).clamp(0.0, span) / span * WIDTH;
    for tick in 0..=10 {
        let at = span * f64::from(tick) / 10.0;
        let place = LEFT + WIDTH * f64::from(tick) / 10.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{place} 38V{height}\" stroke=\"#dddddd\"/><text x=\"{place}\" y=\"34\" text-anchor=\"middle\">{:.1} us</text>",
            from + at
        );
    }
    for (lane, place) in &lanes {
        let y = TOP + LANE * *place as f64 + LANE / 2.0 + 4.0;
        let _ = writeln!(svg, "<text x=\"6\" y=\"{y}\">{}</text>", escaped(lane));
    }
    for bar in &bars {
        let y = TOP + LANE * lanes[bar.lane.as_str()] as f64 + 4.0;
        let width = (x(bar.to) - x(bar.from)).max(1.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{}\"><title>{}</title></rect>",
            x(bar.from),
            LANE - 8.0,
            bar.color,
            escaped(&bar.text)
        );
    }
    svg + "</svg>\n"
}

/// The bars in the span.
fn bars(events: &[Value], begin: f64, span: f64) -> Vec<Bar> {
    let mut bars = Vec::new();
    let is_seen = |from: f64, to: f64| to >= begin && from <= begin + span;
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    for request in requests(events) {
        let at = ["posted", "published", "completed", "polled"].map(|stage| micros(request.number(stage)));
        let is_receive = request.text("queue") == "receive";
        // A receive waits for its message most of the time.
        let stages: &[(usize, &str)] = match is_receive {
            true => &[(2, COMPLETED)],
            false => &[(0, POSTED), (1, DEVICE), (2, COMPLETED)],
        };
        for &(stage, color) in stages {
            if is_seen(at[stage], at[stage + 1]) {
                bars.push(Bar {
                    lane: format!(
                        "{} qp {} {}",
                        request.pid,
                        request.text("qp"),
                        request.text("queue")
                    ),
                    color,
                    from: at[stage],
                    to: at[stage + 1],
                    text: format!(
                        "{} wr_id {}, {} B, {}",
                        request.text("opcode"),
                        request.text("wr_id"),
                        request.number("bytes"),
                        request.text("status")
                    ),
                });
            }
        }
    }
    for event in events {
        let args = &event["args"];
        let (Some(wire), Some(qp)) = (args["wire"].as_str(), args["qp"].as_str()) else {
            continue;
        };
        let (from, to) = (time(event), micros(args["last"].as_u64().unwrap_or(0)));
        if is_seen(from, to) {
            bars.push(Bar {
                lane: format!("{} qp {qp} wire, {wire}", event["pid"]),
                color: WIRE,
                from,
                to,
                text: event["name"].as_str().unwrap_or("").to_owned(),
            });
        }
    }
    bars.truncate(MOST);
    bars
}

fn escaped(text: &str) -> String {
    urnic_console::escaped(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::events::{TRACE, events};
    use super::*;

    #[test]
    fn a_picture_has_a_bar_for_each_stage_in_its_span() {
        let events = events(TRACE).unwrap();
        let count = |text: &str| text.matches("<title>").count();
        assert_eq!(count(&picture(&events, 0.0, 100.0)), 6);
        // Only the second request.
        let second = picture(&events, 8.5, 100.0);
        assert_eq!(count(&second), 3, "{second}");
        assert!(second.contains("7 qp 0x1 send") && second.ends_with("</svg>\n"));
        assert!(picture(&[], 0.0, 1.0).contains("<svg"));
    }
}
