//! A hub on this machine for tests: Hugging Face's routes over files in memory, with faults.
//!
//! Owns: its answers, and a record of its requests. Never: listens on another address than
//! loopback.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// The commit of every revision that the hub has.
pub const COMMIT: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
/// The one model of the hub.
pub const MODEL: &str = "org/tiny";
/// Bytes from which a file is stored as a large one, with SHA-256.
const LARGE_BYTES: usize = 100_000;
/// Far longer than a request takes.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// An answer other than the file; each one happens once.
#[derive(Clone, Debug)]
pub enum HubFault {
    /// A status, with further lines of its head.
    Status(u16, &'static str),
    /// So many bytes, and the end of the connection.
    Cut(usize),
    /// So many bytes, and silence until the client leaves.
    Stall(usize),
    /// All bytes, one of them wrong.
    Damage,
    /// A redirect to this host, for the same path.
    Redirect(String),
    /// The file, after [`TestHub::open_gate`].
    Gate,
}

/// A request that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubRequest {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

#[derive(Default)]
struct HubScript {
    files: BTreeMap<String, Vec<u8>>,
    /// Faults by the end of a path, first one first.
    faults: BTreeMap<String, Vec<HubFault>>,
    /// Answers in the place of files, by the end of a path.
    answers: BTreeMap<String, String>,
    requests: Vec<HubRequest>,
    /// Whether the listing lacks sizes and checksums, as some mirrors' do.
    lists_names_only: bool,
    gate_is_open: bool,
}

/// The hub; its thread ends with the process.
#[derive(Clone)]
pub struct TestHub {
    address: String,
    script: Arc<(Mutex<HubScript>, Condvar)>,
}

impl TestHub {
    /// Starts a hub with these files.
    pub fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound port").to_string();
        let script = HubScript {
            files,
            ..HubScript::default()
        };
        let hub = Self {
            address,
            script: Arc::new((Mutex::new(script), Condvar::new())),
        };
        let serving = hub.clone();
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let hub = serving.clone();
                std::thread::spawn(move || {
                    // A client that leaves is no fault of the hub.
                    let _ = hub.serve(&socket);
                });
            }
        });
        hub
    }

    /// Starts a hub with the files of a folder.
    pub fn of_folder(folder: &Path) -> Self {
        let entries = fs::read_dir(folder).expect("a readable folder").flatten();
        let files = entries.filter(|entry| entry.path().is_file()).map(|entry| {
            let name = entry.file_name().into_string().expect("a readable name");
            (name, fs::read(entry.path()).expect("a readable file"))
        });
        Self::start(files.collect())
    }

    /// Returns the address, as HF_ENDPOINT has it.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    fn with<T>(&self, change: impl FnOnce(&mut HubScript) -> T) -> T {
        let mut script = self.script.0.lock().expect("no thread panicked");
        let changed = change(&mut script);
        self.script.1.notify_all();
        changed
    }

    /// Adds a fault of the paths that end so.
    pub fn fault(&self, path_end: &str, fault: HubFault) {
        self.with(|script| {
            let faults = script.faults.entry(path_end.to_owned()).or_default();
            faults.push(fault);
        });
    }

    /// Leaves sizes and checksums out of the listing from now on.
    pub fn list_names_only(&self) {
        self.with(|script| script.lists_names_only = true);
    }

    /// Answers paths that end so with this text.
    pub fn answer(&self, path_end: &str, text: String) {
        self.with(|script| script.answers.insert(path_end.to_owned(), text));
    }

    /// Answers the requests that wait by [`HubFault::Gate`].
    pub fn open_gate(&self) {
        self.with(|script| script.gate_is_open = true);
    }

    /// Returns the requests so far whose path ends so.
    pub fn requests(&self, path_end: &str) -> Vec<HubRequest> {
        self.with(|script| {
            let requests = script.requests.iter();
            let fits = |request: &&HubRequest| request.path.ends_with(path_end);
            requests.filter(fits).cloned().collect()
        })
    }

    /// Waits until a request of this path has arrived.
    pub fn wait_for_request(&self, path_end: &str) {
        let script = self.script.0.lock().expect("no thread panicked");
        let is_absent = |script: &mut HubScript| {
            let mut requests = script.requests.iter();
            !requests.any(|request| request.path.ends_with(path_end))
        };
        let waited = self
            .script
            .1
            .wait_timeout_while(script, WAIT_MAX, is_absent);
        let (script, limit) = waited.expect("no thread panicked");
        drop(script);
        assert!(!limit.timed_out(), "no request of {path_end}");
    }

    /// Answers one request and closes the connection.
    fn serve(&self, mut socket: &TcpStream) -> std::io::Result<()> {
        let request = read_request(socket)?;
        let path = request.path.clone();
        let range = request.range.as_deref().and_then(|range| {
            let from = range.strip_prefix("bytes=")?.strip_suffix('-')?;
            from.parse::<usize>().ok()
        });
        let is_head = request.method == "HEAD";
        let fault = self.with(|script| {
            script.requests.push(request);
            let mut faults = script.faults.iter_mut();
            let found = faults.find(|(end, list)| path.ends_with(*end) && !list.is_empty());
            found.map(|(_, list)| list.remove(0))
        });
        match &fault {
            Some(HubFault::Status(status, more)) => {
                return write!(
                    socket,
                    "HTTP/1.1 {status} Fault\r\n{more}content-length: 0\r\nconnection: close\r\n\r\n"
                );
            }
            Some(HubFault::Redirect(host)) => {
                return write!(
                    socket,
                    "HTTP/1.1 302 Found\r\nlocation: {host}{path}\r\ncontent-length: 0\r\n\
                     connection: close\r\n\r\n"
                );
            }
            Some(HubFault::Gate) => {
                let script = self.script.0.lock().expect("no thread panicked");
                let opened = self
                    .script
                    .1
                    .wait_while(script, |script| !script.gate_is_open);
                drop(opened.expect("no thread panicked"));
            }
            _ => {}
        }
        let Some((content, checksum)) = self.content(&path) else {
            return write!(
                socket,
                "HTTP/1.1 404 Not Found\r\nx-error-code: {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
                self.error_code(&path)
            );
        };
        let from = range.unwrap_or(0).min(content.len());
        let status = match range {
            Some(_) => format!(
                "206 Partial Content\r\ncontent-range: bytes {from}-{}/{}",
                content.len() - 1,
                content.len()
            ),
            None => "200 OK".to_owned(),
        };
        let mut body = content[from..].to_vec();
        write!(
            socket,
            "HTTP/1.1 {status}\r\netag: \"{checksum}\"\r\nx-repo-commit: {COMMIT}\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        )?;
        if is_head {
            return Ok(());
        }
        match fault {
            Some(HubFault::Cut(bytes)) => socket.write_all(&body[..bytes.min(body.len())]),
            Some(HubFault::Stall(bytes)) => {
                socket.write_all(&body[..bytes.min(body.len())])?;
                let mut line = String::new();
                BufReader::new(socket).read_line(&mut line).map(|_| ())
            }
            Some(HubFault::Damage) => {
                if let Some(byte) = body.last_mut() {
                    *byte ^= 1;
                }
                socket.write_all(&body)
            }
            _ => socket.write_all(&body),
        }
    }

    /// The code by which the hub says what is absent.
    fn error_code(&self, path: &str) -> &'static str {
        if !path.contains(&format!("/{MODEL}/")) {
            "RepoNotFound"
        } else if path.starts_with("/api/") {
            "RevisionNotFound"
        } else {
            "EntryNotFound"
        }
    }

    /// The bytes of a path, and their checksum.
    fn content(&self, path: &str) -> Option<(Vec<u8>, String)> {
        let answer = self.with(|script| {
            let mut answers = script.answers.iter();
            let found = answers.find(|(end, _)| path.ends_with(end.as_str()));
            found.map(|(_, text)| text.clone().into_bytes())
        });
        if let Some(answer) = answer {
            return Some((answer, String::new()));
        }
        let path = path.split('?').next().unwrap_or_default();
        let listing = format!("/api/models/{MODEL}/revision/");
        if let Some(revision) = path.strip_prefix(&listing) {
            let is_known = ["main", "v1", COMMIT].contains(&revision);
            return is_known.then(|| (self.listing().into_bytes(), "listing".to_owned()));
        }
        let file = path.strip_prefix(&format!("/{MODEL}/resolve/{COMMIT}/"))?;
        let content = self.with(|script| script.files.get(file).cloned())?;
        let checksum = checksum(&content);
        Some((content, checksum))
    }

    fn listing(&self) -> String {
        self.with(|script| {
            let names_only = script.lists_names_only;
            let file = |(name, content): (&String, &Vec<u8>)| {
                if names_only {
                    return json!({"rfilename": name});
                }
                let (size, checksum) = (content.len(), checksum(content));
                if size < LARGE_BYTES {
                    return json!({"rfilename": name, "size": size, "blobId": checksum});
                }
                json!({"rfilename": name, "size": size, "blobId": COMMIT,
                       "lfs": {"sha256": checksum, "size": size, "pointerSize": 130}})
            };
            let siblings: Vec<_> = script.files.iter().map(file).collect();
            json!({"id": MODEL, "sha": COMMIT, "siblings": siblings, "gated": false}).to_string()
        })
    }
}

/// The checksum by which the hub names a file: git's, or of a large file SHA-256.
pub fn checksum(content: &[u8]) -> String {
    let mut context = if content.len() < LARGE_BYTES {
        let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        context.update(format!("blob {}\0", content.len()).as_bytes());
        context
    } else {
        Context::new(&SHA256)
    };
    context.update(content);
    let digest = context.finish();
    let digits = digest.as_ref().iter();
    digits.map(|byte| format!("{byte:02x}")).collect()
}

fn read_request(socket: &TcpStream) -> std::io::Result<HubRequest> {
    let mut reader = BufReader::new(socket);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut words = first.split_whitespace().map(str::to_owned);
    let mut request = HubRequest {
        method: words.next().unwrap_or_default(),
        path: words.next().unwrap_or_default(),
        range: None,
        authorization: None,
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else {
            return Ok(request);
        };
        match name.to_lowercase().as_str() {
            "range" => request.range = Some(value.trim().to_owned()),
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
}
