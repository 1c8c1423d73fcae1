#!/bin/sh
# Take out of an installed environment ($1) what the service never loads: it halves the image. The class archive, made
# after this, runs Spark and the decoder and opens Kafka's clients, so a jar too many taken here fails the build.
set -eu
site=$(echo "$1"/lib/python3.*/site-packages)
jars=$site/pyspark/jars

# Spark's own RocksDB is for stateful operators; we have none, and keep our states ourselves.
rm "$jars"/rocksdbjni-*
# Machine learning and graphs.
rm "$jars"/spark-mllib_* "$jars"/spark-graphx_* "$jars"/breeze* "$jars"/spire* "$jars"/cats-kernel* "$jars"/algebra_* \
   "$jars"/JTransforms-* "$jars"/arpack* "$jars"/lapack* "$jars"/blas-*
# Hive, and the database in which it keeps its catalogue. ORC needs hive-storage-api.
find "$jars" -name '*hive*' ! -name 'hive-storage-api-*' -delete
rm "$jars"/derby* "$jars"/datanucleus-* "$jars"/libthrift-* "$jars"/libfb303-* "$jars"/jdo-api-* "$jars"/javax.jdo-* \
   "$jars"/javolution-*
# Cluster managers: Spark runs in this process' own JVM.
rm "$jars"/kubernetes-* "$jars"/spark-kubernetes_* "$jars"/spark-yarn_* "$jars"/vertx-* "$jars"/bcprov-*
# Spark Connect, and the shell's compiler.
rm "$jars"/spark-connect* "$jars"/spark-repl_* "$jars"/scala-compiler-* "$jars"/jline-*
# Native code for other systems.
find "$jars" -name 'netty-*' \( -name '*osx*' -o -name '*windows*' \) -delete

rm -r "$site"/pyspark/examples "$site"/pyspark/data
# pyarrow's other file formats, file systems and RPC, its headers and sources.
rm -r "$site"/pyarrow/tests "$site"/pyarrow/include "$site"/pyarrow/src
find "$site"/pyarrow \( -name '*flight*' -o -name '_substrait*' -o -name '*s3fs*' -o -name 'libarrow_s3*' \
  -o -name '*azurefs*' -o -name '*gcsfs*' -o -name '*_cpp_tests*' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' \) \
  -delete

# Packages are installed; none will be.
rm -rf "$site"/pip "$site"/pip-* "$site"/setuptools "$site"/setuptools-* "$site"/pkg_resources "$1"/bin/pip*
find "$1" -name '*.pyc' -delete
