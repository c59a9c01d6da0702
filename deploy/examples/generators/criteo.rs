// The generator of ../criteo in Rust: a line of Kaggle's display advertising format to a line of MultiSlot text.
// Build: rustc -O -o criteo-rust criteo.rs
use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, BufWriter, Write};

const NUM_INTEGERS: usize = 13;
const NUM_CATEGORIES: usize = 26;

/// A number as the job reads it: the shortest digits of its nearest float32, which Python writes, too. `{:?}` writes
/// as many, but rounds another way where two texts are equally near.
fn float(value: f64) -> String {
    let rounded = f64::from(value as f32);
    let mut texts = (1..).map(|digits| format!("{rounded:.digits$}"));
    texts.find(|text| text.parse() == Ok(rounded)).expect("17 digits are enough")
}

/// An integer as a dense value and as a feature id; both are kept, as few integers are many of the fields.
#[derive(Clone)]
struct Integer {
    dense: String,
    step: i64,
}

fn integer_of(known: &mut HashMap<String, Integer>, text: &str) -> Result<Integer, Box<dyn Error>> {
    if let Some(found) = known.get(text) {
        return Ok(found.clone());
    }
    let value: i64 = text.parse()?;
    let step = if value < 3 { value + 4 } else { (value as f64).ln().powi(2) as i64 + 7 };
    let found = Integer { dense: float((value.max(0) as f64).ln_1p()), step: step.max(1) };
    known.insert(text.to_string(), found.clone());
    Ok(found)
}

/// The sample of an event: each slot in the order of the job file, as its length and its values.
fn sample(known: &mut HashMap<String, Integer>, event: &str) -> Result<String, Box<dyn Error>> {
    let fields: Vec<&str> = event.split('\t').collect();
    if fields.len() != 1 + NUM_INTEGERS + NUM_CATEGORIES {
        return Err(format!("{} fields instead of {}", fields.len(), 1 + NUM_INTEGERS + NUM_CATEGORIES).into());
    }
    let label: f64 = fields[0].parse()?;
    let integers = fields[1..=NUM_INTEGERS]
        .iter()
        .map(|text| integer_of(known, text))
        .collect::<Result<Vec<_>, _>>()?;
    let mut line = NUM_INTEGERS.to_string();
    for each in &integers {
        write!(line, " {}", each.dense)?;
    }
    for text in &fields[1 + NUM_INTEGERS..] {
        if text.is_empty() {
            line.push_str(" 0");
        } else {
            write!(line, " 1 {}", u64::from_str_radix(text, 16)?)?;
        }
    }
    for each in &integers {
        write!(line, " 1 {}", each.step)?;
    }
    write!(line, " 1 {}", float(label))?;
    Ok(line)
}

fn main() -> io::Result<()> {
    let mut known = HashMap::from([(String::new(), Integer { dense: "0.0".to_string(), step: 0 })]);
    let mut samples = BufWriter::with_capacity(1 << 20, io::stdout().lock());
    for event in BufReader::with_capacity(1 << 20, io::stdin().lock()).lines() {
        match sample(&mut known, event?.trim_end_matches('\r')) {
            Ok(line) => writeln!(samples, "{line}")?,
            Err(error) => writeln!(samples, "! {error}")?, // the event is rejected, with this reason
        }
    }
    samples.flush()
}
