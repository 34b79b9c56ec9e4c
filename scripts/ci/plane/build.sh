#!/usr/bin/env bash
# Builds a Kubernetes control plane from Debian's packages: kube-apiserver and kube-controller-manager 1.20.2 from the
# source package (the full tree, vendor folder included), etcd as Debian built it. No root, and nothing is installed:
# an apt index of its own lies under FOLDER, and packages are unpacked there.
# usage: build.sh FOLDER [--cached]
#        Leaves FOLDER/bin/{etcd,kube-apiserver,kube-controller-manager}; prints FOLDER/bin.
#        --cached: builds nothing, and fails if the programs are not there
# Needs apt and Debian's archive key, tar, 2 GB of disk while it builds and some seven minutes of CPU, once.
# CLEAVE_DEBIAN sets another address of Debian's archive.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
if [ -e "$folder/complete" ]; then echo "$folder/bin"; exit; fi
if [ "${2:-}" = --cached ]; then echo "not built: run scripts/ci/plane/build.sh $1" >&2; exit 1; fi
debian=${CLEAVE_DEBIAN:-http://deb.debian.org/debian}
key=/usr/share/keyrings/debian-archive-keyring.gpg
if ! [ -e "$key" ] || ! command -v apt-get > /dev/null; then echo "needs apt-get and $key" >&2; exit 1; fi

# An index of Debian 12's main part, binary and source, that the machine's own apt does not see.
rm -rf "$folder"/{packages,source}
mkdir -p "$folder"/{apt/lists/partial,apt/cache/archives/partial,packages,bin,source}
printf '%s [signed-by=%s] %s bookworm main\n' deb "$key" "$debian" deb-src "$key" "$debian" > "$folder/apt/sources.list"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$folder/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o APT::Sandbox::User="$(id -un)")
"${apt[@]}" update >&2
cd "$folder/packages"
"${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server >&2
for package in *.deb; do dpkg -x "$package" "$folder/packages"; done
"${apt[@]}" source --download-only kubernetes >&2

export GOROOT="$folder/packages/usr/lib/go-1.19" GOPATH="$folder/source" GOCACHE="$folder/gocache"
export GO111MODULE=off GOPROXY=off GOFLAGS='' CGO_ENABLED=0 PATH="$folder/packages/usr/lib/go-1.19/bin:$PATH"
tree="$GOPATH/src/k8s.io/kubernetes"
mkdir -p "$tree"
tar xzf "$folder"/packages/kubernetes_*1.20.2.orig.tar.gz -C "$tree" --strip-components=1
cd "$tree"
# The vendored reflect2 1.0.1 crashes under Go 1.18 and later at the first write of a custom resource; 1.0.2 does not.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$folder/packages/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
rm -f vendor/github.com/modern-go/reflect2/*_test.go
# Clients read this version from the server; a release build stamps it from git.
sed -i -E 's/"v0\.0\.0-master\+[^"]*"/"v1.20.2"/' staging/src/k8s.io/{component-base,client-go/pkg}/version/base.go
# The one generated file that the tarball lacks: the OpenAPI definitions of every package that asks for them.
go build -o "$folder/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
marked='^//\s*\+k8s:openapi-gen=true'
packages=$({ grep -rl --include=doc.go -E "$marked" staging/src pkg cmd
             grep -rl --include='*.go' -E "$marked" staging/src/k8s.io/apimachinery/pkg; } \
  | grep -vE 'testdata|/test/|sample-|example|code-generator|wardle' | xargs -n1 dirname \
  | sed -e 's#^staging/src/##' -e 's#^pkg/#k8s.io/kubernetes/pkg/#' | sort -u | paste -sd,)
"$folder/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt -i "$packages" \
  -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi --report-filename "$folder/violations.txt" >&2
for program in kube-apiserver kube-controller-manager; do
  go build -ldflags '-s -w' -o "$folder/bin/$program" "./cmd/$program"
done
cp "$folder/packages/usr/bin/etcd" "$folder/bin/etcd"
touch "$folder/complete"
cd "$folder" && chmod -R u+w source && rm -rf apt packages source gocache openapi-gen violations.txt
echo "$folder/bin"
