# in one terminal
pgmb work retry:app --install
# in another
pgmb publish charge 42
pgmb dlq list retry.charge
