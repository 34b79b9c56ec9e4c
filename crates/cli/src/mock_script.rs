//! Answers of a mock engine from a file, so that clients can be tested against exact outputs.
//!
//! Owns: the format of the file, its check, and the choice of an answer by the text of the prompt.
//! Never: divides an answer into reasoning, text and calls: that is for whoever serves a model's
//! outputs. Invariant: every prompt has exactly one answer, which depends on its text alone.

use anyhow::{Context, bail, ensure};
use cleave_domain::TokenId;
use cleave_engine::AnswerScript;
use cleave_text::json::Document;
use cleave_text::{ModelText, RenderEnd, SpecialTokens, TemplateInput, TemplateValue};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;

/// Limit of a script file, far above what tests of clients need.
const SCRIPT_BYTES_MAX: u64 = 16 << 20;

/// The content of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptFile {
    /// The first answer whose conditions hold is given.
    answers: Vec<AnswerEntry>,
}

/// An answer, and the conditions under which it is given.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerEntry {
    /// Texts that are all in the prompt.
    #[serde(default)]
    contains: Vec<String>,
    /// Texts of which none is in the prompt.
    #[serde(default)]
    lacks: Vec<String>,
    /// Number of this answer in its conversation, from 1.
    turn: Option<usize>,
    /// The output, in the model's format.
    text: String,
}

/// An entry with its tokens.
struct ScriptedAnswer {
    contains: Vec<String>,
    lacks: Vec<String>,
    turn: Option<usize>,
    tokens: Arc<[TokenId]>,
}

/// The answers of a file, for the tokenizer and the chat template of a model.
pub(crate) struct MockScript {
    text: ModelText,
    /// Beginning of every answer in a conversation; `None` if the template has none, or no answer
    /// asks for a turn.
    opening: Option<String>,
    answers: Vec<ScriptedAnswer>,
    /// Names the content of the file.
    digest: String,
}

impl MockScript {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// One that names the file and the answer with the defect.
    pub(crate) fn open(path: &Path, text: ModelText) -> anyhow::Result<Self> {
        let content = cleave_files::read_text(path, SCRIPT_BYTES_MAX);
        let script = content
            .map_err(Into::into)
            .and_then(|content| Self::new(&content, text));
        script.with_context(|| format!("--mock-script {}", path.display()))
    }

    fn new(content: &str, text: ModelText) -> anyhow::Result<Self> {
        let ScriptFile { answers } = serde_saphyr::from_str(content)?;
        ensure!(!answers.is_empty(), "it has no answer");
        let last = answers.len();
        let opening = if answers.iter().any(|entry| entry.turn.is_some()) {
            let opening = answer_opening(&text);
            Some(opening.context("`turn`: the model's chat template begins answers with no text by which they could be counted; use `contains`")?)
        } else {
            None
        };
        let mut checked = Vec::new();
        for (number, entry) in (1..).zip(answers) {
            let answer = entry
                .check(&text)
                .with_context(|| format!("answer {number}"))?;
            match (answer.is_for_all(), number == last) {
                (true, false) => bail!(
                    "answer {number} has no condition, so that the answers after it would never be given"
                ),
                (false, true) => bail!(
                    "answer {number} is the last and has a condition; the last one must have none, for all other \
                     prompts"
                ),
                _ => checked.push(answer),
            }
        }
        let digest = Sha256::digest(content.as_bytes());
        let digest = digest.iter().take(8).map(|byte| format!("{byte:02x}"));
        Ok(Self {
            opening,
            answers: checked,
            digest: digest.collect(),
            text,
        })
    }

    /// Names the content of the file, in 16 hexadecimal digits.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// The answer to a prompt of this text.
    fn chosen(&self, prompt: &str) -> &ScriptedAnswer {
        let turn = self
            .opening
            .as_deref()
            .map(|opening| prompt.matches(opening).count());
        let mut answers = self.answers.iter();
        let chosen = answers.find(|answer| answer.fits(prompt, turn));
        chosen.expect("the last answer has no condition")
    }
}

impl AnswerScript for MockScript {
    fn answer(&self, prompt: &[TokenId]) -> Arc<[TokenId]> {
        let prompt = self.text.tokenizer().decode(prompt, SpecialTokens::Kept);
        Arc::clone(&self.chosen(&prompt).tokens)
    }
}

impl AnswerEntry {
    /// # Errors
    /// If the answer cannot be given exactly.
    fn check(self, model: &ModelText) -> anyhow::Result<ScriptedAnswer> {
        let Self {
            contains,
            lacks,
            turn,
            text,
        } = self;
        ensure!(turn != Some(0), "`turn` counts from 1");
        let texts = contains.iter().chain(&lacks);
        ensure!(
            texts.into_iter().all(|text| !text.is_empty()),
            "`contains` and `lacks`: every prompt has the empty text"
        );
        let tokenizer = model.tokenizer();
        let tokens = tokenizer.encode(&text, SpecialTokens::Skipped)?;
        let given = tokenizer.decode(&tokens, SpecialTokens::Kept);
        ensure!(
            given == text,
            "`text`: the model's tokenizer would make {given:?} of it"
        );
        let count = tokens.len();
        let limit = model.context_tokens_max() as usize;
        ensure!(
            count < limit,
            "`text`: its {count} tokens exceed the context of {limit}; see --max-model-len and the profile"
        );
        Ok(ScriptedAnswer {
            contains,
            lacks,
            turn,
            tokens: tokens.into(),
        })
    }
}

impl ScriptedAnswer {
    fn is_for_all(&self) -> bool {
        self.contains.is_empty() && self.lacks.is_empty() && self.turn.is_none()
    }

    fn fits(&self, prompt: &str, turn: Option<usize>) -> bool {
        let has = |text: &String| prompt.contains(&**text);
        self.contains.iter().all(has)
            && !self.lacks.iter().any(has)
            && (self.turn.is_none() || self.turn == turn)
    }
}

/// Returns the text with which the chat template begins every answer of a conversation; `None` if
/// the model has no template, or the template begins them with nothing.
fn answer_opening(model: &ModelText) -> Option<String> {
    let question = json!({"role": "user", "content": "Why?"});
    let answer = json!({"role": "assistant", "content": "So."});
    let asked = rendered(model, &json!([question]), RenderEnd::Closed)?;
    let opened = rendered(model, &json!([question]), RenderEnd::AnswerOpening)?;
    // Templates write the last answer in another way than those before it.
    let answered = rendered(
        model,
        &json!([question, answer, question]),
        RenderEnd::Closed,
    )?;
    let new = opened.strip_prefix(&asked)?.chars();
    let old = answered.strip_prefix(&asked)?.chars();
    let common = new.zip(old).take_while(|(new, old)| new == old);
    let opening: String = common.map(|(new, _)| new).collect();
    let opening = opening.trim();
    (!opening.is_empty()).then(|| opening.to_owned())
}

fn rendered(model: &ModelText, messages: &serde_json::Value, end: RenderEnd) -> Option<String> {
    let body = Document::check(messages.to_string()).ok()?;
    let part = body.part(body.root());
    let rendered = model.render(&TemplateInput {
        messages: TemplateValue::of_json(&part, body.root()),
        body_bytes: body.len(),
        tools: None,
        documents: None,
        variables: None,
        last_content: None,
        end,
    });
    rendered.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_text::ModelFiles;

    fn model() -> ModelText {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/qwen3");
        ModelText::new(ModelFiles::read(&folder).unwrap()).unwrap()
    }

    fn prompt(messages: &serde_json::Value) -> Vec<TokenId> {
        let model = model();
        let text = rendered(&model, messages, RenderEnd::AnswerOpening).unwrap();
        model
            .tokenizer()
            .encode(&text, SpecialTokens::Skipped)
            .unwrap()
    }

    fn answered(script: &MockScript, messages: &serde_json::Value) -> String {
        let tokens = script.answer(&prompt(messages));
        script.text.tokenizer().decode(&tokens, SpecialTokens::Kept)
    }

    const SCRIPT: &str = r#"
answers:
  - contains: [Oslo]
    lacks: ["<tool_response>"]
    text: |-
      <think>
      Ask the tool.
      </think>

      <tool_call>
      {"name": "weather", "arguments": {"city": "Ås"}}
      </tool_call>
  - turn: 3
    text: Third.
  - text: Anything else.
"#;

    #[test]
    fn a_script_answers_by_the_text_of_the_prompt() {
        let script = MockScript::new(SCRIPT, model()).unwrap();
        let user = |content: &str| json!({"role": "user", "content": content});
        let reply = json!({"role": "assistant", "content": "Well."});
        let tool = json!({"role": "tool", "content": "Rain"});
        let call = answered(&script, &json!([user("Weather in Oslo?")]));
        assert!(call.starts_with("<think>") && call.contains("Ås"), "{call}");
        let answered_tool = json!([user("Weather in Oslo?"), reply, tool]);
        assert_eq!(answered(&script, &answered_tool), "Anything else.");
        let third = json!([user("A"), reply, user("B"), reply, user("C")]);
        assert_eq!(answered(&script, &third), "Third.");
        let fourth = json!([
            user("A"),
            reply,
            user("B"),
            reply,
            user("C"),
            reply,
            user("D")
        ]);
        assert_eq!(answered(&script, &fourth), "Anything else.");
    }

    #[test]
    fn marks_in_a_script_are_the_special_tokens() {
        let script = MockScript::new(SCRIPT, model()).unwrap();
        let mark = script.text.tokenizer().id_of("<tool_call>").unwrap();
        let tokens = script.answer(&prompt(&json!([{"role": "user", "content": "Oslo"}])));
        assert!(tokens.contains(&mark));
    }

    #[track_caller]
    fn refused(content: &str, expected: &str) {
        let error = MockScript::new(content, model()).err().expect("a refusal");
        let text = format!("{error:#}");
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_script_with_a_mistake_is_refused_with_its_place() {
        refused("answers: []", "no answer");
        refused(
            "answers: [{text: a}, {text: b}]",
            "answer 1 has no condition",
        );
        refused("answers: [{turn: 1, text: a}]", "answer 1 is the last");
        refused(
            "answers: [{turn: 0, text: a}, {text: b}]",
            "answer 1: `turn` counts",
        );
        refused(
            "answers: [{lacks: [''], text: a}, {text: b}]",
            "the empty text",
        );
        refused("answers:\n  - text: a\n    unless: b", "line 3");
        refused("answers:\n  - contains: [a]\n", "text");
        let long = format!("answers: [{{text: '{}'}}]", "ab ".repeat(2000));
        refused(&long, "exceed the context of 512");
    }

    #[test]
    fn a_script_in_json_is_read_as_one_in_yaml() {
        let content = json!({"answers": [{"text": "A \"quote\"\nand more"}]}).to_string();
        let script = MockScript::new(&content, model()).unwrap();
        let asked = json!([{"role": "user", "content": "Hi"}]);
        assert_eq!(answered(&script, &asked), "A \"quote\"\nand more");
        assert_eq!(script.digest().len(), 16);
    }

    #[test]
    fn turns_need_a_template_that_opens_answers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/qwen3");
        let files = ModelFiles {
            chat_template: Some("{% for m in messages %}[{{ m.content }}]{% endfor %}".into()),
            ..ModelFiles::read(&folder).unwrap()
        };
        let model = ModelText::new(files).unwrap();
        let error = MockScript::new("answers: [{turn: 1, text: a}, {text: b}]", model).err();
        let text = format!("{:#}", error.expect("a refusal"));
        assert!(text.contains("use `contains`"), "{text}");
    }
}
